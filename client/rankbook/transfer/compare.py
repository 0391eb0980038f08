"""Whether two engines may pair, and everything that speaks against it.

A verdict lists every broken rule, so that one restart can mend them all. What a
side does not state breaks no rule: an empty text or a zero means not stated.
The rules themselves are in `rankbook.transfer.rules`.
"""

from __future__ import annotations

from rankbook.transfer.peers import Comparison, FactorDifference, Pair, PeerSide
from rankbook.transfer.rules import RULES

__all__ = ["compare_peers"]


def compare_peers(producer: PeerSide, consumer: PeerSide) -> Comparison:
    """Compares two engines as producer and consumer.

    Args:
        producer: The engine that would give KV away.
        consumer: The engine that would take it.

    Returns:
        The verdict: compatible when no rule is broken, else every broken rule
        in a fixed order; and, either way, every stated compatibility factor in
        which the two differ, by name.
    """
    pair = Pair(producer, consumer, differing_factors(producer, consumer))
    reasons = tuple(broken for rule in RULES for broken in rule(pair))
    return Comparison(not reasons, reasons, pair.factors)


def differing_factors(producer: PeerSide, consumer: PeerSide) -> tuple[FactorDifference, ...]:
    """Compatibility factors in which two engines differ, by name.

    A factor that only one side states is a difference, unless the other states
    no factors at all. The attention backend and the extra layers are taken from
    the records where the factors leave them out.
    """
    left, right = dict(producer.factors), dict(consumer.factors)
    if not left or not right:
        left, right = {}, {}
    if not {"attention_backend", "attn_backend_name"} & {*left, *right} and (
        producer.attention_backend and consumer.attention_backend
    ):
        left["attention_backend"] = producer.attention_backend
        right["attention_backend"] = consumer.attention_backend
    # A draft layer that one side lacks leaves the main layers whole: a difference
    # to show, not a broken rule.
    left["extra_layers"] = _extra_text(producer)
    right["extra_layers"] = _extra_text(consumer)
    return tuple(
        FactorDifference(name, left.get(name, ""), right.get(name, ""))
        for name in sorted({*left, *right})
        if left.get(name, "") != right.get(name, "")
    )


def _extra_text(side: PeerSide) -> str:
    return ",".join(f"{one.index}:{one.kind}" for one in sorted(side.extra, key=lambda e: e.index))
