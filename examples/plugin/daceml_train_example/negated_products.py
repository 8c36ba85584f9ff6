"""The pass negated_products."""

from dataclasses import dataclass

from daceml_train.passes import Rewrite


@dataclass(frozen=True)
class NegatedProducts(Rewrite):
    """Multiply two negated arrays without negating them, which gives the same bits.

        a -> [neg] -> m, b -> [neg] -> n;  m, n -> [mul] -> y      =>      a, b -> [mul] -> y

    Bytes: neither m nor n is written or read.
    """

    level = "intra_operator"

    def match(self, uses, node):
        sides = [uses.producers.get(name) for name in node.inputs]
        fits = node.op.label == "mul" and sides[0] is not sides[1] and all(m and m.op.label == "neg" for m in sides)
        return {"m": sides[0], "n": sides[1]} if fits else None

    def legality(self, match):
        for name in (part.outputs[0] for part in match.bindings.values()):
            yield match.uses.only_reader(name, match.root), f"the negative %{name} has another reader"

    def traffic(self, match):
        return -2 * match.uses.bytes(*(part.outputs[0] for part in match.bindings.values()))

    def emit(self, match, builder, values):
        return (values[match.bindings["m"].inputs[0]] * values[match.bindings["n"].inputs[0]],)
