"""From kernels to maps, from maps to compiled functions, and the host program that launches them."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of DaCe's own code, which `python -W error` would make an error of
    import dace.codegen.codegen
    import dace.codegen.targets.cpu  # noqa: F401
