"""Five questions from issue trackers, each as a command of `offbeat advise` and its verdict, and
estimates of advice beside times that others have published.

    python benchmarks/stories.py            writes profiles, prints verdicts, saves the result
    python benchmarks/stories.py --print    prints the verdicts of the profiles as they are

Profiles are on paper: sizes follow from the shapes of the models, compute from published throughput
of one device. The sources stand beside the numbers. The backward takes twice the forward.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tables import save

from offbeat.cli import app
from offbeat.cli.entry import mark_script
from offbeat.experiments.advice.methods import ESTIMATED
from offbeat.experiments.advice.question import Answer, Question, answer
from offbeat.experiments.advice.selection import MAX_STALENESS
from offbeat.experiments.advice.verdict import Work, rate
from offbeat.experiments.advice.verdict_text import least_rate
from offbeat.experiments.elsewhere import described_link, on_links
from offbeat.plan import Payload
from offbeat.profile import Bucket, Link, Profile
from offbeat.sim import predict
from offbeat.strategies import DDP, DiLoCo, LocalSGD

HERE = Path(__file__).parent
FOLDER = HERE / "stories"
ADAM_BYTES = 8  # per parameter: two moments of float32
MIXED_BYTES = 12  # the same, and float32 parameters beside those of bf16


def profile_of(
    layers: Sequence[tuple[str, int]], compute_s: float, element_bytes: int, state_bytes: int
) -> Profile:
    """Return a profile of one GPU.

    Args:
        layers: name and number of parameters of each bucket, from the output to the input.
        compute_s: seconds of forward and backward; a layer's share is that of its parameters.
        element_bytes: bytes of a parameter and of its gradient.
        state_bytes: bytes of the optimizer's state per parameter.
    """
    total = sum(count for _, count in layers)
    buckets = tuple(
        Bucket(
            name,
            forward_s=compute_s / 3 * count / total,
            backward_s=compute_s * 2 / 3 * count / total,
            size_bytes=element_bytes * count,
            state_bytes=state_bytes * count,
        )
        for name, count in layers
    )
    return Profile(buckets, (Link("net", 0.0, 1e12),), 1, device="cuda")


def llama_7b() -> Profile:
    """Llama 2 7B in bf16: 32 layers of 202 M parameters, two embeddings of 131 M.

    3,700 tokens per second and A100 with batches of 2 x 4,096 tokens. Source: PyTorch blog,
    "Maximizing training throughput using PyTorch FSDP", 2024-03-13.
    """
    layer = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096
    embedding = 32000 * 4096
    layers = [("head", embedding), *((f"layer.{i}", layer) for i in range(31, -1, -1))]
    layers.append(("embedding", embedding))
    return profile_of(layers, 2 * 4096 / 3700, 2, MIXED_BYTES)


def llama_8b() -> Profile:
    """Llama 3 8B in bf16 on 64 A100 with FSDP: 32 layers of 218 M parameters, two embeddings of
    525 M.

    2,904 tokens per second and device with one sequence of 8,192 tokens. Source: torchtitan,
    docs/performance.md of its first release, Llama 3 8B on 64 A100, selective layer checkpointing.
    """
    layer = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
    embedding = 128256 * 4096
    layers = [("head", embedding), *((f"layer.{i}", layer) for i in range(31, -1, -1))]
    layers.append(("embedding", embedding))
    return profile_of(layers, 8192 / 2904, 2, MIXED_BYTES)


def gpt2() -> Profile:
    """GPT-2 124M in float32: 12 layers of 7.1 M parameters, one embedding of 39.4 M.

    221,000 tokens per second on two RTX 4090, so 110,500 on one; batches of 32 x 1,024 tokens.
    Source: tylerromero.com/posts/nanogpt-speedrun-worklog, baseline of 2025-01-16.
    """
    layer = 12 * 768**2 + 13 * 768
    embedding = 50257 * 768 + 1024 * 768
    layers = [*((f"layer.{i}", layer) for i in range(11, -1, -1)), ("embedding", embedding)]
    return profile_of(layers, 32 * 1024 / 110_500, 4, ADAM_BYTES)


def efficientnet_b0() -> Profile:
    """EfficientNet-B0 in float32, 5.29 M parameters: classifier, head and 16 blocks of their sizes.

    300 images in .4 s on an RTX A6000, 200 on an RTX 2080 Ti: 2,500 images per second with batches
    of 300, 300, 200 and 200. Source: pull request 580 of huggingface/pytorch-image-models.
    """
    blocks = [717_232, 587_952, 587_952, 587_952, 262_492, 208_572, 208_572, 126_004, 102_900]
    blocks += [102_900, 37_130, 31_290, 15_350, 10_712, 6_004, 1_448]
    layers = [("classifier", 1_281_000), ("head", 412_160)]
    layers += [(f"block.{15 - i}", count) for i, count in enumerate(blocks)]
    return profile_of(layers, 200 * 0.4 / 300, 4, 4)


TWO_SITES = """\
hosts = 2
congestion_control = "cubic"

[[links]]
name = "net"
rate = "1gbit"
latency = "20ms"
loss = 0.0001
"""

UNLIKE = """\
hosts = 4
rate = "1gbit"

[[overrides]]  # two RTX 2080 Ti beside two RTX A6000, at two thirds of their speed
host = 2
speed = 0.667

[[overrides]]
host = 3
speed = 0.667
"""


@dataclass(frozen=True)
class Story:
    """A question, and the command that answers it.

    Attributes:
        question: what users ask.
        trackers: issues with the question.
        profile: function that makes the profile.
        options: options of the command, without the profile.
        cluster: text of the cluster file; None without one.
    """

    name: str
    question: str
    trackers: str
    profile: Callable[[], Profile]
    options: str
    cluster: str | None = None

    @property
    def command(self) -> str:
        return f"offbeat advise --profile benchmarks/stories/{self.name}.json {self.options}"


STORIES = (
    Story(
        "two-machines",
        "two machines of 8 A100 with 1 Gbit/s, 7B parameters, ZeRO-3: slower than one. Why?",
        "DeepSpeed 5770, 4281, 6889; LLaVA 362; LlamaFactory 5014",
        llama_7b,
        "--hosts 2 --per-node 8 --rate 1gbit --samples 1G --batch 8192 --device-memory 80GB",
    ),
    Story(
        "four-consumers",
        "four machines with an RTX 4090 each on a switch of 1 Gbit/s: worth it?",
        "pytorch 36298; fairscale 793; open_clip 466",
        gpt2,
        "--hosts 4 --rate 1gbit --samples 10G --batch 32768 --device-memory 24GB",
    ),
    Story(
        "two-sites",
        "two sites of 64 A100 with 1 Gbit/s, 20 ms and .01 % of loss between them",
        "skypilot 5554; torchtitan 566; prime-diloco 173",
        llama_8b,
        "--cluster benchmarks/stories/two-sites.toml --per-node 64 --samples 10G --batch 8192",
        TWO_SITES,
    ),
    Story(
        "unlike-gpus",
        "two RTX A6000 and two RTX 2080 Ti: the slower ones hold up the others",
        "pytorch 22296, 81395; pytorch-image-models 580",
        efficientnet_b0,
        "--cluster benchmarks/stories/unlike-gpus.toml --samples 100M --batch 200",
        UNLIKE,
    ),
    Story(
        "one-is-best",
        "two machines at home with 100 Mbit/s, and the numbers must be those of DDP",
        "pytorch 36298; FfDL 169; ray 45825",
        gpt2,
        "--hosts 2 --rate 100mbit --samples 10G --batch 32768 --max-staleness 0",
    ),
)


# --- published times -----------------------------------------------------------------------------

# Seconds of an all-reduce with NCCL over 4 and 8 machines: bytes, delay, rate, ranks, measured.
# Source: BinhangYuan/tc_cluster_setting, results/Simulate_DP.md.
ALL_REDUCES = (
    (1 << 28, 0.001, 5e9, 4, 0.71),
    (1 << 28, 0.001, 5e9, 8, 0.87),
    (1 << 28, 0.005, 2e9, 4, 1.77),
    (1 << 28, 0.005, 2e9, 8, 2.50),
    (1 << 28, 0.010, 1e9, 4, 4.06),
    (1 << 28, 0.010, 1e9, 8, 5.14),
    (1 << 28, 0.050, 1e9, 4, 7.57),
    (1 << 28, 0.050, 1e9, 8, 8.27),
    (1 << 30, 0.001, 5e9, 4, 3.15),
    (1 << 30, 0.001, 5e9, 8, 3.81),
    (1 << 30, 0.005, 2e9, 4, 7.23),
    (1 << 30, 0.005, 2e9, 8, 8.23),
    (1 << 30, 0.010, 1e9, 4, 16.87),
    (1 << 30, 0.010, 1e9, 8, 17.21),
    (1 << 30, 0.050, 1e9, 4, 29.83),
)

# Training of 30.8 M float32 parameters on four machines with an L40S each: seconds of compute per
# iteration, then for each rate in Mbit/s (measured with iperf3) the seconds per iteration of local
# SGD and DiLoCo with period 1 and 8, and of DDP. Source: Adnan082/diloco-measured, results/raw,
# repetition 0; the mean over the window after the warm-up.
MEASURED_PARAMETERS, MEASURED_COMPUTE_S = 30_846_720, 0.0257
TRAINING = (
    (49.6, 38.10, 38.24, 4.786, 4.703, 53.44),
    (198.5, 8.251, 8.303, 1.027, 1.035, 11.36),
    (992.6, 1.528, 1.533, 0.2080, 0.2093, 1.994),
    (4963.5, 0.3396, 0.3440, 0.0638, 0.0651, 0.4199),
)
WINDOWS = {1: 1.0, 8: 17 / 140}  # averages per iteration in the window


def all_reduce_rows() -> Iterator[list[Any]]:
    one = Profile((Bucket("b", 0.1, 0.2, 4),), (Link("net", 0.0, 1e12),), 1)
    for size, delay_s, rate_bps, ranks, measured_s in ALL_REDUCES:
        message = replace(one, buckets=(Bucket("b", 0.1, 0.2, size),))
        there = on_links(message, ranks, [described_link("net", ranks, rate_bps, delay_s)])
        estimated_s = there.message_s(Payload("grad", range(1)), "net")
        yield [
            f"{size >> 20} MiB, {ranks} machines, {rate(rate_bps)}, {1e3 * delay_s:g} ms",
            measured_s,
            round(estimated_s, 3),
            round(measured_s / estimated_s, 2),
        ]


def training_rows() -> Iterator[list[Any]]:
    layers = [(f"layer.{i}", MEASURED_PARAMETERS // 8) for i in range(8)]
    one = profile_of(layers, MEASURED_COMPUTE_S, 4, ADAM_BYTES)
    for mbps, *measured in TRAINING:
        there = on_links(one, 4, [described_link("net", 4, 1e6 * mbps)])
        message_s = predict(LocalSGD(1), there).iteration_s - MEASURED_COMPUTE_S
        methods = (
            (LocalSGD(1), 1),
            (DiLoCo(1, fragments=1), 1),
            (LocalSGD(8), 8),
            (DiLoCo(8, fragments=1), 8),
            (DDP(), None),
        )
        for (strategy, period), measured_s in zip(methods, measured, strict=True):
            if period is None:
                predicted_s = predict(strategy, there).iteration_s
            else:  # the window does not hold whole periods
                predicted_s = MEASURED_COMPUTE_S + message_s * WINDOWS[period]
            yield [
                f"{strategy}, {mbps:g} Mbit/s",
                measured_s,
                float(f"{predicted_s:.4g}"),
                round(measured_s / predicted_s, 2),
            ]


# --- verdicts ------------------------------------------------------------------------------------


def answer_of(story: Story) -> Answer:
    """Return the answer of a story's command, by the options of the command line."""
    words = mark_script(shlex.split(story.command)[1:])
    _, bound, *_ = app.parse_args(words, exit_on_error=False, print_error=False)
    given = bound.arguments
    question = Question(
        work=Work.of(given.get("samples"), given.get("batch")),
        hosts=given.get("hosts"),
        rate=given.get("rate"),
        devices=given.get("per_node", 1),
        cluster=given.get("cluster"),
        max_staleness=given.get("max_staleness", MAX_STALENESS),
        device_memory=given.get("device_memory"),
    )
    return answer(question, Profile.load(given["profile"]), given["profile"])


def verdict_rows(story: Story, found: Answer) -> Iterator[list[Any]]:
    verdict = found.verdict
    for row in verdict.rows:
        assert row.seconds is not None
        assert row.range_s is not None
        needed = row.rate_bps
        yield [
            story.name,
            f"{row.method.label}{' (taken)' if row is verdict.best else ''}",
            row.method.change,
            *(float(f"{seconds / 3600:.3g}") for seconds in (row.seconds, *row.range_s)),
            None if needed is None else least_rate(needed),
            float(f"{row.memory.total_bytes / 1e9:.3g}"),
            None if row.fits is None else ("yes" if row.fits else "no"),
        ]


def sentence_of(found: Answer) -> str:
    """Return the first sentences of the text."""
    text = " ".join(found.text(1000).partition("\n\n")[0].split())
    return text.partition(" warning:")[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--print", action="store_true", dest="only_print")
    options = parser.parse_args()
    os.chdir(HERE.parent)
    verdicts, sentences = [], []
    for story in STORIES:
        if not options.only_print:
            story.profile().save(FOLDER / f"{story.name}.json")
            if story.cluster is not None:
                (FOLDER / f"{story.name}.toml").write_text(story.cluster)
        found = answer_of(story)
        print(f"$ {story.command}\n{found.text(80)}\n", flush=True)
        verdicts += verdict_rows(story, found)
        sentences.append([story.name, story.question, story.trackers, f"`{story.command}`"])
        sentences[-1].append(sentence_of(found))
    if options.only_print:
        return
    reduces, trained = list(all_reduce_rows()), list(training_rows())
    low, high = ESTIMATED
    outside = [row[0] for row in (*reduces, *trained) if not low <= row[3] <= high]
    save(
        "stories",
        {
            "title": "Five questions and their verdicts; estimates beside published times",
            "what": (
                "Questions of issue trackers as commands of `offbeat advise`, with profiles on "
                "paper: sizes from the shapes of the models, compute from published throughput of "
                "one device (sources in benchmarks/stories.py). Then the messages that advice "
                "estimates from a rate alone, and iterations with them, beside measurements of "
                "others, in which this project has no part."
            ),
            "how": ["predicted"],
            "date": options_date(),
            "machine": "any; nothing is measured",
            "command": "python benchmarks/stories.py",
            "tables": [
                {
                    "name": "questions",
                    "title": "Questions and verdicts",
                    "columns": ["story", "question", "asked in", "command", "verdict"],
                    "page": {"columns": ["question", "verdict"]},
                    "rows": sentences,
                },
                {
                    "name": "verdicts",
                    "title": "Hours of each method",
                    "columns": [
                        *("story", "method", "numbers", "hours", "least", "most"),
                        *("90 % of compute at", "GB per device", "fits"),
                    ],
                    "rows": verdicts,
                },
                {
                    "name": "all-reduces",
                    "title": "Published all-reduces beside the estimate of a rate and a delay",
                    "columns": ["message", "measured, s", "estimated, s", "ratio"],
                    "rows": reduces,
                },
                {
                    "name": "training",
                    "title": "Published seconds per iteration, four machines, 30.8 M parameters",
                    "columns": ["method", "measured, s", "predicted, s", "ratio"],
                    "rows": trained,
                },
            ],
            "misses": [f"Outside of the stated range ({low} to {high}): {', '.join(outside)}."],
            "notes": [
                "With 50 ms and 1 Gbit/s the window of a connection limits the rate, which the "
                "estimate does not model; advice adds a note.",
                "DDP of that measurement takes 1.2 to 1.4 times as long as one average of all "
                "parameters over the same links; the estimate has no such difference.",
                "Messages inside a machine count as free, and codecs as well, because profiles on "
                "paper have no speeds of codecs.",
            ],
        },
    )


def options_date() -> str:
    import datetime

    return datetime.datetime.now(tz=datetime.UTC).date().isoformat()


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError), contextlib.redirect_stderr(io.StringIO()):
        main()
