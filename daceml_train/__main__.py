"""`python -m daceml_train`: the command line."""

import sys

from daceml_train.cli import main

sys.exit(main())
