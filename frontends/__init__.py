"""Frontends, one folder per framework: each turns a user's model into an operator graph."""

if __name__ != "daceml_train.frontends":
    raise ImportError(
        f"{__name__!r} is the source folder of 'daceml_train.frontends'; import it by that name. "
        "Under two names there would be two copies of every class in it."
    )
