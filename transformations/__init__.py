"""The levels of transformations, each a folder of small named passes, and the pipelines built from them."""

if __name__ != "daceml_train.transformations":
    raise ImportError(
        f"{__name__!r} is the source folder of 'daceml_train.transformations'; import it by that name. "
        "Under two names there would be two copies of every class in it."
    )
