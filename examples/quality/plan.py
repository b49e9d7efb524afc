"""What is run: the tasks in full size for a GPU, smaller for a CPU, or tiny for a quick trial."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from bytes_lm.config import Config
from quality.attentions import ATTENTIONS
from quality.runs import Run
from quality.tasks import RecallConfig

TEXT, RECALL, JOINED, JOINED_FAR = (
    "text",
    "recall",
    "recall, joined pairs",
    "recall, joined pairs, trained far",
)


@dataclass(frozen=True)
class Setup:
    """A task with its sizes; recall is None for text."""

    config: Config
    recall: RecallConfig | None
    evaluated: int = 256


def reach(config: Config) -> int:
    """How far back a token can have an influence through sliding windows, layer upon layer."""
    return config.layers * (config.window - 1)


def far_only(setup: Setup) -> Setup:
    """The same, but in training no question stands where sliding windows could reach the pairs."""
    assert setup.recall is not None
    return replace(setup, recall=replace(setup.recall, nearest=reach(setup.config)))


_RECALL = Setup(
    Config(
        layers=2,
        width=128,
        heads=2,
        kv_heads=2,
        length=512,
        window=32,
        batch=32,
        steps=3000,
        lr=3e-3,
    ),
    RecallConfig(),
)
_JOINED = Setup(
    replace(_RECALL.config, steps=1500),
    RecallConfig(pairs=8, keys=16, values=8, joined=True),
)
FULL_SIZE: Mapping[str, Setup] = {
    JOINED: _JOINED,
    RECALL: _RECALL,
    TEXT: Setup(
        Config(
            layers=4,
            width=256,
            heads=4,
            kv_heads=2,
            length=2048,
            window=128,
            batch=8,
            steps=800,
            lr=2e-3,
        ),
        None,
        evaluated=64,
    ),
    JOINED_FAR: far_only(_JOINED),
}
# For CPUs: takes minutes, and is large enough for the results to mean something.
_SMALL_JOINED = Setup(
    Config(
        layers=1,
        width=64,
        heads=2,
        kv_heads=2,
        length=96,
        window=12,
        batch=16,
        steps=300,
    ),
    RecallConfig(questions=48, values=8, joined=True),
)
SMALL: Mapping[str, Setup] = {JOINED: _SMALL_JOINED, JOINED_FAR: far_only(_SMALL_JOINED)}
_QUICK = Config(layers=1, width=16, heads=2, kv_heads=1, length=48, window=8, batch=2, steps=4)
_QUICK_RECALL = RecallConfig(pairs=2, fewest_pairs=1, questions=12, keys=8, values=8)
_QUICK_JOINED = Setup(_QUICK, replace(_QUICK_RECALL, joined=True), evaluated=8)
QUICK: Mapping[str, Setup] = {
    RECALL: Setup(_QUICK, _QUICK_RECALL, evaluated=8),
    JOINED: _QUICK_JOINED,
    JOINED_FAR: far_only(_QUICK_JOINED),
    TEXT: Setup(_QUICK, None, evaluated=8),
}


def plan(setups: Mapping[str, Setup], seeds: int, scale: float = 1.0) -> list[Run]:
    """All runs, in an order in which those that start before a time limit form whole comparisons.

    scale: factor by which the numbers of training steps are multiplied.
    """
    return [
        Run(
            task,
            attention,
            replace(setup.config, seed=seed, steps=max(1, round(setup.config.steps * scale))),
            setup.recall,
            setup.evaluated,
        )
        for task, setup in setups.items()
        for seed in range(seeds)
        for attention in ATTENTIONS
    ]
