"""Code generation: from kernels to maps, and from maps to compiled functions."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of DaCe's own code, which `python -W error` would make an error of
    import dace.codegen.codegen
    import dace.codegen.targets.cpu  # noqa: F401
