"""One small launch of each family of kernels, for compute-sanitizer."""

import sys

from tests.codegen.test_families import families
from tests.gpu.test_kernels import on_device

if __name__ == "__main__":
    wrong = on_device(families(5, 130, 1))
    print("\n".join(wrong) or "all right")
    sys.exit(bool(wrong))
