"""DeMo: momentum that each worker keeps, of which only the largest cosine components are shared."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from offbeat.core.codecs import codec
from offbeat.core.plan import Apply, Buffer, Fact, Moment, Plan, Wire, local
from offbeat.core.profile import Profile
from offbeat.core.rules.vocabulary import Context, Setting, rule
from offbeat.core.strategy.interface import Planned, require_choice
from offbeat.strategies.bsp import all_gradients
from offbeat.strategies.compressible import encoded_message_s
from offbeat.strategies.equations import Array, Equations, World
from offbeat.strategies.methods.sparseloco import fade
from offbeat.strategies.outer_optimizer import is_real

CODEC = "dct-topk"
MOMENTUM = "decoupled momentum"
STEP = Moment("step")


@rule(conserves=False, buffer=Setting("buffer", "grad", kind="grad"))
def take_signs(context: Context, apply: Apply) -> None:
    """Compute `buffer = sign(buffer)`, without the absence counters behind gradients.

    Source: Peng, Quesnelle and Kingma, DeMo, 2024, reference code (sign-SGD).
    """
    for array in context.parameters(apply.arg("buffer", "grad"), apply.buckets):
        # Two comparisons have the same meaning on arrays and on tensors.
        array[...] = (array > 0) * 1.0 - (array < 0) * 1.0


@dataclass(frozen=True)
class DeMo(Planned):
    """Send the largest cosine components of a momentum that each worker keeps by itself.

    In every iteration each worker adds its gradient to its own momentum, sends the fastest
    components and takes them out of the momentum. The optimizer steps on the mean:

        m_k = beta m_k + g_k;  q_k = codec(m_k);  m_k -= q_k;  g = sign(mean_k(q_k))

    The codec is `dct-topk`: the share `fraction` of the coefficients of each 64 x 64 elements. Use
    SGD without momentum as optimizer: its momentum is in m. Readings: gradients are added without
    the learning rate, which the sign removes unless it changes; a worker that has not
    sent a coefficient counts as zero in its mean (Algorithm 1), while the reference code leaves
    this worker out; one message holds all gradients.
    """

    fraction: float = 0.0078
    """Share of the coefficients of each chunk that is sent; .0078 is 32 of 4096."""
    beta: float = 0.999
    """Factor of the momentum before the gradient is added (the code's `compression_decay`)."""
    sign: bool = True
    """Whether the optimizer steps on the signs of the mean, as in the reference code, or on the
    mean itself, as in Algorithm 1."""

    name: ClassVar[str] = "demo"
    synchronous: ClassVar[bool] = False
    unadvised: ClassVar[str] = (
        "its optimizer is SGD without momentum, with a learning rate of its own"
    )
    citation: ClassVar[str] = (
        "Peng, Quesnelle and Kingma, DeMo: Decoupled momentum optimization, arXiv 2411.19870, "
        "2024, Algorithm 1"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_real(self.fraction) or not 0 < self.fraction <= 1:
            raise ValueError(
                f"fraction ({self.fraction!r}) must lie above 0 and be at most 1; .0078 sends 32 "
                "of 4096 coefficients"
            )
        if not is_real(self.beta) or not 0 <= self.beta < 1:
            raise ValueError(
                f"beta ({self.beta!r}) must be at least 0 and below 1: with 1 gradients that are "
                "not sent never fade"
            )
        require_choice("sign", self.sign, (True, False))

    @property
    def _wire(self) -> Wire:
        return Wire(CODEC, (("fraction", float(self.fraction)),), error=MOMENTUM)

    @property
    def is_lossy(self) -> bool:
        return True

    def describe_change(self, plan: Plan | None) -> str | None:
        step = "signs of " if self.sign else ""
        return f"lossy: the optimizer steps on {step}the largest components of a momentum"

    def schedule(self, profile: Profile) -> Plan:
        everything, single = range(len(profile.buckets)), profile.world_size == 1
        [message] = all_gradients(profile, phases=[0])
        applies: list[Apply] = []
        if not single:
            settings = (("buffer", MOMENTUM), ("share", float(self.beta)))
            fading = Apply(fade.__name__, everything, message.after, message.phases, args=settings)
            applies.append(fading)
        if self.sign:
            applies.append(Apply(take_signs.__name__, everything, STEP, message.phases))
        size = profile.payload_bytes("grad", everything)
        return Plan(
            self.name,
            len(everything),
            (message if single else replace(message, wire=self._wire),),
            (*applies, local(len(everything), STEP, [0])),
            buffers=() if single else (Buffer(MOMENTUM, "grad"),),
            facts=(Fact("memory_bytes", 0 if single else size, "further buffers on every rank"),),
        )

    def equations(self, plan: Plan) -> Equations:
        used, kept = codec(CODEC, dict(self._wire.args)), list[Any]()

        def average(gradients: Array, momentum: Array) -> Array:
            momentum[...] = self.beta * momentum + gradients
            sent = np.array([used.round_trip(row) for row in momentum])
            momentum -= sent
            mean = np.repeat(sent.mean(axis=0)[None], len(sent), axis=0)
            return np.sign(mean) if self.sign else mean

        def advance(world: World, iteration: int) -> None:
            if not kept:
                kept.append(0 * world.keep())
            world.gradients(iteration)
            world.change(None, average, *kept, kind="grad")
            world.step()
            world.end()

        return advance

    def bound_s(self, profile: Profile) -> float:
        """Return `max(F + B, C)` with C of the encoded message."""
        message_s = encoded_message_s(profile, "grad", self._wire)
        return max(profile.slowest().compute_s, message_s)
