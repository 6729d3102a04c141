"""A run: one training job. The same frozen structs are read from `RUN.toml` and sent to every node.

The coordinator owns the file; nodes receive the struct and compare `config_hash`, so two nodes that disagree
about the arithmetic never train together. `protocol.run.config_file` reads TOML into such structs.
"""

from __future__ import annotations

import hashlib
from pathlib import PurePath
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from protocol.base.bounded import Path, PublicName, Text
from protocol.base.errors import BadInputError
from protocol.base.printable import is_printable
from protocol.run.config_hash import config_hash, older_hashes
from protocol.run.course import EVEN, PLANNED, check_course_keys, check_cut_of_auto, parts_of
from protocol.run.mixture import parse_mixture
from protocol.run.places import MEMORY, check_url, is_url
from protocol.run.segments import SEGMENTS_MAX, check_segments

DESCRIPTION_MAX = 400
"""Characters of the operator's words: five lines of a terminal, above a question that has twenty."""
MICROBATCHES_MAX = 2**16
"""Of a step: those of the validation have the numbers behind."""
VALIDATION_BATCHES_MAX = 1024
"""Servers keep their activations until the step is closed: at 8 B parameters (17 MB each in 8 bits) 17 GB over all
front servers of a stage. Some dozens tell a loss to the third digit."""
LEARNING_RATE_MAX = 100.0
"""Of no use far below: what is more is a slip of the pen."""


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the file. Defaults are the demo's."""


class ModelSection(_Section, frozen=True, kw_only=True):
    """A LLaMA: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

    layers: int = 4
    """Transformer layers; each is two sub-layer blocks (attention, feed-forward)."""
    hidden: int = 128
    """Width of the residual stream."""
    heads: int = 4
    """Query heads; `hidden / heads` is the head width and must be even (rotary pairs)."""
    kv_heads: int = 2
    """Key/value heads; divides `heads`."""
    feed_forward: int = 352
    """Width of the SwiGLU."""
    context: int = 128
    """Tokens of one sample (sequence length)."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    norm_eps: float = 1e-5
    """Added to the mean square in RMSNorm."""
    tied_embeddings: bool = False
    """Head shares the embedding's matrix; then routes end on stage 0, where they begin."""
    start_from: Path = ""
    """A Hugging Face folder (LlamaForCausalLM) whose weights the run starts from; empty: seeded."""


class DataSection(_Section, frozen=True, kw_only=True):
    """Where tokens come from. Only the servers of stage 0 read it."""

    source: Path = "builtin:python"
    """`builtin:python`, `builtin:grammar`, a folder made by `barnraise data prepare`, or a path to .txt, .md, .jsonl
    (also .gz, .zst), .parquet or .arrow files (folder or glob). Beyond 268 million characters it must be prepared."""
    text_field: Text = "text"
    """The field of a jsonl line, or the column of a table, that holds the text."""
    tokenizer: Path = "bytes"
    """`bytes` (256 values and an end mark), `bpe:SIZE` trained on the data, a path to a tokenizer.json, or `prepared`:
    that of the prepared folder."""
    mixture: Text = ""
    """How often each part of a prepared folder comes, as in `books=0.7 code=0.3`; empty: every sample once an epoch."""


class OptimizerSection(_Section, frozen=True, kw_only=True):
    """AdamW on the servers' CPUs, with the global gradient norm clipped."""

    learning_rate: float = 1.5e-3
    """Peak learning rate."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled decay of matrices; the gains of norms do not decay."""
    clip_norm: float = 1.0
    """Global norm above which gradients are scaled down; 0 switches clipping off."""
    warmup_steps: int = 20
    """Steps of linear warm-up."""
    decay: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """How the rate falls after the warm-up, until the last step. `wsd` (warm-up, stable, decay): not until the last
    `decay_share` of the steps, then linearly; so a run can be made longer before that without having fallen too far."""
    decay_share: float = 0.2
    """Share of all steps, the last ones, in which `wsd` falls."""
    final_ratio: float = 0.1
    """Share of the peak that is left at the last step."""


class BatchSection(_Section, frozen=True, kw_only=True):
    """What one step holds."""

    microbatches: int = 8
    """Microbatches of a step: the unit of a task."""
    samples: int = 2
    """Samples of one microbatch."""
    segments: int = 1
    """Parts of a sample's tokens that go through the stages one after the other, each on its way as soon as the one
    before is computed (Seq1F1B): for long samples. They are cut to cost the same, so later ones are shorter; what a
    volunteer keeps of the earlier ones stays on its device."""
    delay: Literal[0, 1] = 1
    """Delayed parameter update: step t runs on version max(0, t - delay)."""


class StagesSection(_Section, frozen=True, kw_only=True):
    """How the model is cut. The planner fills in what stands open."""

    count: int = 2
    """Pipeline stages. `"auto"` (0 on the wire): as many as make the shortest step with the servers that are there when
    the run begins."""
    cut: Text = "even"
    """Where the model is cut: `even`; `planned`, by what the run's first servers and volunteers measure, with the
    servers put where their links suit; or the sub-layer blocks that begin each part but the first, as in `3 6`. What a
    plan has chosen stands in its sentence in this form: the cut is part of the result, and another run can name it."""
    front_servers: int = 1
    """Front servers of each stage."""
    back_servers: int = 1
    """Back servers of each stage; 0: its front servers are its back servers too."""
    chunks: int = 1
    """Parts of the model that each stage holds, apart from each other; more than one needs another placement."""
    placement: Literal["line", "interleaved", "v"] = "line"
    """Where chunks lie: one a stage; dealt out in turns; or down the stages and up again."""
    order: Literal["backward", "forward", "interleaved", "tuned"] = "backward"
    """What a node does first of what is ready in the oldest step: backwards, which free memory and let others go on;
    forwards; by turns; or `tuned`, what a planner finds fastest when it simulates the run with what its first servers
    and volunteers measure (the plan's sentence says what, and why). No part of the arithmetic, nor of the hash: it
    changes no weight."""
    collocated: Literal["when_empty", "always", "never"] = "when_empty"
    """Whether servers compute too: only while no volunteer serves their stage, always, or never."""


class RoutesSection(_Section, frozen=True, kw_only=True):
    """Which way microbatches go. What is skipped or exchanged is trained less: a route is part of the result."""

    skip: float = 0.0
    """Share of the stages that each route leaves out, in turns, rounded to whole stages; stage 0 never is."""
    swaps: int = 0
    """Pairs of neighbouring visits that each route exchanges, in turns."""


BoundaryForm = Literal["fp32", "bf16", "q8", "d4"]
"""Of activations and their gradients."""


class WireSection(_Section, frozen=True, kw_only=True):
    """Forms of tensors between nodes; part of the arithmetic, so part of the config hash."""

    activations_up: BoundaryForm = "q8"
    """Form of activations and of their gradients from a volunteer to a server. `q8`: 8.13 bits a value, at no loss that
    could be measured. `d4`: 4.13 bits, at a loss that can be (`node/README.md`), for lines that are slow up: only what
    a stage has added to its input (to its output's gradient) goes up, and the server, which has that, adds it; what
    begins a route, or comes back from its end, goes as `q8`. Needs `stages.back_servers = 0`."""
    activations_down: Literal["fp32", "bf16", "q8"] = "q8"
    """The same from a server to a volunteer or to the next server: as `activations_up`, or `q8` where that is `d4`."""
    gradients: Literal["gi", "fp64", "fp32", "bf16"] = "gi"
    """Form of summed weight gradients. `gi`: whole steps of a grid that follows the gradient's size, 4 to 5 bits each;
    a task's gradient is rounded once, the same wherever it is computed, and sums are exact, so the weights do not
    depend on who summed what. fp64 does not round and loses next to nothing of a sum, at 14 times the bytes; the others
    halve or quarter that, and what they round depends on who summed what."""
    parameters: Literal["p12", "fp32", "bf16"] = "p12"
    """Form of parameters sent to volunteers. `p12`: whole numbers of a fixed unit, to which everybody's weights are
    rounded for computing (not the servers' own): about 10 bits each for a newcomer, and from then on 2 to 3.3 bits for
    what a step has changed, at no loss that could be measured."""
    gradient_grid_bits: int = 0
    """With `gradients = "fp32"`, half the upload, and weights that still do not depend on who summed what: a task's
    gradients are rounded to multiples of 2^-bits, so that fp32 sums below 2^(24 - bits) are exact. 0: not rounded."""

    def output_form(self, begins: bool) -> BoundaryForm:
        """In which a visit's output goes to a server; `begins`: the visit is its route's first, which reads tokens."""
        return self.activations_down if begins else self.activations_up

    def input_gradient_form(self, ends: bool) -> BoundaryForm:
        """The same of its input gradient; `ends`: the visit is its route's last, which computes the loss."""
        return self.activations_down if ends else self.activations_up


class ComputeSection(_Section, frozen=True, kw_only=True):
    """How volunteers compute: the class of numerics that the run's results belong to."""

    dtype: Literal["fp32", "bf16"] = "fp32"
    """Numbers of weights, activations and gradients while a stage is computed; servers keep weights and moments in fp32
    in any case. bf16 halves a volunteer's memory, and graphics cards are many times as fast in it. Results are the same
    to the last bit on equal devices and versions of torch; other devices round elsewhere."""
    split_backward: bool = False
    """Whether a volunteer computes a task's input gradient first, sends it at once, and the weights' gradients when it
    has nothing to do that others wait for. Results are the same to the last bit; a graph takes up to half as much
    memory again, and lives until both are done."""


class CheckpointSection(_Section, frozen=True, kw_only=True):
    """When all stages write a checkpoint that a fresh set of servers can start from."""

    every_steps: int = 100
    """Steps between checkpoints; 0 writes only the last."""
    keep: int = 3
    """Newest complete checkpoints that are kept; where results are audited (`[audit] rate`) some older ones, too, about
    one for each doubling of their age, so that `barnraise run void` finds one from before somebody came."""
    folder: Path = "checkpoints"
    """A folder that every server can write, or a place in an object store (s3://, gs://, az://); relative means below
    the server's state folder."""
    buddy: Literal["auto", "always", "never"] = "auto"
    """Whether another server keeps in memory what each shard has committed, so that a server that is lost with its disk
    costs open steps only, not all since the newest checkpoint. A step ends when the copy is there: 12 to 16 bytes a
    parameter of the shard. `auto`: where that is at most half of what the step's boundaries take of the same line."""

    @property
    def is_url(self) -> bool:
        """Whether it lies in an object store."""
        return is_url(self.folder)

    @property
    def shared(self) -> bool:
        """Whether all servers write to one place."""
        return self.is_url or PurePath(self.folder).is_absolute()

    def export_hint(self, run_folder: str = "") -> str:
        """For people, at the end of a run: where the checkpoint lies, and how a model is made of it."""
        where = run_folder or self.folder
        if self.shared:
            return f"it lies in {where}; `barnraise export OUT {where}` writes the model"
        return (
            "each server has its part in its --state folder; `barnraise export OUT STATE...`, naming all of them,"
            " writes the model"
        )


class ValidationSection(_Section, frozen=True, kw_only=True):
    """How well the model does on text that it was not trained on: forwards through the same pipeline, no gradients."""

    every_steps: int = 0
    """Versions of the weights between two that are validated; the first and the last one are, too. 0: none is."""
    batches: int = 8
    """Microbatches of text kept aside that a version is validated on, the same ones each time."""
    share: float = 0.015625
    """Share of the samples that is kept aside, at most 4,096 of them; which ones follows from the data and `seed`."""
    source: Path = ""
    """Text of its own, as in `data.source`, with the run's tokenizer; then nothing of the data is kept aside."""


class GuardSection(_Section, frozen=True, kw_only=True):
    """What happens when training goes wrong. A run that goes back is paused, too: left alone, it would do the same."""

    not_finite: Literal["skip", "pause", "rollback"] = "skip"
    """A step whose gradient is not finite is skipped; then the run goes on, is paused, or goes back as well."""
    spike: float = 0.0
    """A loss over so many times the mean of the 20 steps before is a spike; 0: nothing is."""
    on_spike: Literal["pause", "rollback"] = "pause"
    """`rollback`: to the newest checkpoint from before the step."""


class LimitsSection(_Section, frozen=True, kw_only=True):
    """Bounds of the run's protocol; each has the reason beside it."""

    lease_s: float = 60.0
    """A task unfinished for so long goes to somebody else; the issuer's clock counts."""
    contribution_tasks: int = 512
    """Most tasks whose weight gradients travel as one contribution. A volunteer sends one a step when it can, since
    each costs a whole stage's vector on the way up; this bounds its list of tasks, and what a drop can lose."""
    silent_s: float = 6.0
    """A link on which nothing came for so long is down (two missed pings and a half)."""
    ping_s: float = 2.0
    """Quiet time after which a ping is sent. Where it is more than two seconds volunteers report as seldom, too."""
    snapshot_steps: int = 20
    """Versions between a shard's snapshots on its own disk; between them its journal holds the gradients."""
    linger_s: float = 10.0
    """A volunteer that has waited so long for more work of a step, and twice as long as an upload takes, sends what it
    has summed up; normally it is told that no more will come."""
    server_gone_s: float = 120.0
    """A server away for so long, with no step closed meanwhile, loses its place to a spare; the run goes back to the
    newest checkpoint, so shorter is not better. Where a buddy has its shard: a quarter of it, and no step is lost."""
    volunteers_max: int = 256
    """Volunteers that one server holds links to."""


class AuditSection(_Section, frozen=True, kw_only=True):
    """How much of the volunteers' work is computed again by servers that compute (`stages.collocated`), to find false
    results. No part of the arithmetic: what an audit finds changes who takes part."""

    rate: float = 0.05
    """Share of the contributions that are audited once a member has shown itself; 0: no audits at all, for runs among
    people who know each other. A liar that is always found gets 19 false ones in before it is caught, at 0.05."""
    first: int = 20
    """A new member's contributions are all audited until so many have been found right, in each stage."""
    tolerance: float = 0.02
    """Relative difference (L2) up to which results are the same: what bf16 and other graphics cards make. Within one
    class of devices and kernels there is none. Of sums in the form `gi` it is that of the gradients before they were
    rounded: the sums themselves differ by up to the root of it."""


class RunConfig(_Section, frozen=True, kw_only=True):
    """`RUN.toml`, whole."""

    name: PublicName = "demo"
    """The run's name: lower-case letters, digits and dashes; names folders and metrics."""
    description: Annotated[str, Meta(max_length=DESCRIPTION_MAX)] = ""
    """The operator's words to whoever is asked to lend a computer: what the run is for, and by whom; at most 400
    characters. They may change while the run runs; whoever agreed to the words before is asked again."""
    seed: int = 1
    """Decides the weights' start and the order of the data."""
    steps: int = 600
    """Optimizer updates of the run."""
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    optimizer: OptimizerSection = OptimizerSection()
    batch: BatchSection = BatchSection()
    stages: StagesSection = StagesSection()
    routes: RoutesSection = RoutesSection()
    wire: WireSection = WireSection()
    compute: ComputeSection = ComputeSection()
    checkpoint: CheckpointSection = CheckpointSection()
    validation: ValidationSection = ValidationSection()
    guard: GuardSection = GuardSection()
    limits: LimitsSection = LimitsSection()
    audit: AuditSection = AuditSection()

    @property
    def step_tokens(self) -> int:
        """Tokens that a step of this configuration trains on: every label counts. Where the run was changed meanwhile,
        `protocol.run.batches` knows what a step has."""
        return self.batch.microbatches * self.batch.samples * self.model.context

    @property
    def block_count(self) -> int:
        """Sub-layer blocks: embedding, two a layer, head (with the final norm)."""
        return 2 * self.model.layers + 2

    def version_of(self, step: int) -> int:
        """The parameter version that step `step` runs on (design section 3)."""
        return max(0, step - self.batch.delay)

    def validates(self, step: int) -> bool:
        """Whether forwards of the validation go with a step: those of the version that it runs on.

        No step runs on the last version, nor, with a delay, on the one before it: they have steps of their own behind
        the others, in which nothing is trained. The last version is always validated.
        """
        version, every = step - self.batch.delay, self.validation.every_steps
        if every == 0 or not 0 <= version <= self.steps:
            return False
        return version % every == 0 or version == self.steps

    @property
    def final_step(self) -> int:
        """The step behind all others that only validates the last version."""
        return self.steps + self.batch.delay

    @property
    def final_steps(self) -> tuple[int, ...]:
        """The steps behind all others that only validate versions which none of those runs on."""
        return tuple(step for step in range(self.steps, self.final_step + 1) if self.validates(step))

    def has_step(self, step: int) -> bool:
        """Whether there is work of such a step: the run's own, and those that validate what they made."""
        return 0 <= step < self.steps or step in self.final_steps

    @property
    def is_open(self) -> bool:
        """Whether the coordinator has still to choose how the model is cut: nobody trains by such a configuration."""
        return self.stages.count == 0 or self.stages.cut == PLANNED

    @property
    def asks_planner(self) -> bool:
        """Whether servers measure each other, and a planner works, before the run begins."""
        return self.is_open or self.stages.order == TUNED

    def settled(self, stage_count: int, edges: tuple[int, ...] = ()) -> RunConfig:
        """The run with its open keys filled in: the number of stages, and the blocks that begin each part but the
        first (none: cut evenly). One cut has one form, since the configuration's hash follows from it."""
        cut = EVEN if self.stages.cut == PLANNED else self.stages.cut
        even = msgspec.structs.replace(self, stages=msgspec.structs.replace(self.stages, count=stage_count, cut=cut))
        words = " ".join(map(str, edges))
        if self.stages.cut != PLANNED or not words:
            return even
        planned = msgspec.structs.replace(even, stages=msgspec.structs.replace(even.stages, cut=words))
        return even if parts_of(planned) == parts_of(even) else planned

    def settles(self, other: RunConfig) -> bool:
        """Whether this is `other` with its open keys filled in, and nothing else changed that is computed by."""
        if not other.is_open or self.is_open:
            return False
        stages = msgspec.structs.replace(
            self.stages,
            count=self.stages.count if other.stages.count else 0,
            cut=other.stages.cut if other.stages.cut == PLANNED else self.stages.cut,
        )
        return msgspec.structs.replace(self, stages=stages).config_hash() == other.config_hash()

    def config_hash(self) -> bytes:
        """32 bytes that two nodes compare before they train together."""
        return config_hash(self)

    def hashes(self) -> tuple[bytes, ...]:
        """What the configuration is called, then what older builds called it: their state stays good."""
        return config_hash(self), *older_hashes(self)

    def has_hash(self, claimed: bytes) -> bool:
        """Whether this configuration is meant, by this build or an older one."""
        return claimed in self.hashes()

    def terms_hashes(self) -> tuple[bytes, ...]:
        """32 bytes for what a person agrees to, the configuration and the operator's words; then those for the same
        by what older builds called it."""
        return tuple(
            hashlib.blake2b(known + self.description.encode(), digest_size=32, person=b"br-run-terms").digest()
            for known in self.hashes()
        )

    def validate(self) -> None:
        """Raises `BadInputError` naming the first field whose value cannot be."""
        for field, value, least, most in (
            ("seed", self.seed, 0, 2**63 - 1),
            ("steps", self.steps, 1, 10**9),
            ("model.layers", self.model.layers, 1, 1024),
            ("model.hidden", self.model.hidden, 2, 65536),
            ("model.heads", self.model.heads, 1, 1024),
            ("model.kv_heads", self.model.kv_heads, 1, self.model.heads),
            ("model.feed_forward", self.model.feed_forward, 1, 2**20),
            ("model.context", self.model.context, 1, 2**20),
            ("batch.microbatches", self.batch.microbatches, 1, MICROBATCHES_MAX),
            ("batch.samples", self.batch.samples, 1, 2**16),
            ("batch.segments", self.batch.segments, 1, SEGMENTS_MAX),
            ("stages.count", self.stages.count or 1, 1, self.block_count),  # 0: "auto"
            ("stages.front_servers", self.stages.front_servers, 1, 64),
            ("stages.back_servers", self.stages.back_servers, 0, 64),
            ("stages.chunks", self.stages.chunks, 1, 64),
            ("routes.swaps", self.routes.swaps, 0, 64),
            ("optimizer.warmup_steps", self.optimizer.warmup_steps, 0, 10**9),
            ("checkpoint.every_steps", self.checkpoint.every_steps, 0, 10**9),
            ("checkpoint.keep", self.checkpoint.keep, 1, 10**6),
            ("validation.every_steps", self.validation.every_steps, 0, 10**9),
            ("validation.batches", self.validation.batches, 1, VALIDATION_BATCHES_MAX),
            ("wire.gradient_grid_bits", self.wire.gradient_grid_bits, 0, 60),
            ("limits.contribution_tasks", self.limits.contribution_tasks, 1, 1024),
            ("limits.snapshot_steps", self.limits.snapshot_steps, 1, 10**6),
            ("limits.volunteers_max", self.limits.volunteers_max, 1, 4096),
            ("audit.first", self.audit.first, 0, 10**6),
        ):
            if not least <= value <= most:
                raise BadInputError(f"{field}: {value} is not between {least} and {most}")
        for field, number, low, high in (
            ("optimizer.learning_rate", self.optimizer.learning_rate, 0.0, LEARNING_RATE_MAX),
            ("optimizer.beta1", self.optimizer.beta1, 0.0, 1.0),
            ("optimizer.beta2", self.optimizer.beta2, 0.0, 1.0),
            ("optimizer.eps", self.optimizer.eps, 0.0, 1.0),
            ("optimizer.weight_decay", self.optimizer.weight_decay, 0.0, 100.0),
            ("optimizer.clip_norm", self.optimizer.clip_norm, 0.0, 1e9),
            ("optimizer.decay_share", self.optimizer.decay_share, 0.0, 1.0),
            ("optimizer.final_ratio", self.optimizer.final_ratio, 0.0, 1.0),
            ("routes.skip", self.routes.skip, 0.0, 1.0),
            ("guard.spike", self.guard.spike, 0.0, 1e6),
            ("validation.share", self.validation.share, 0.0, 0.5),
            ("audit.rate", self.audit.rate, 0.0, 1.0),
            ("audit.tolerance", self.audit.tolerance, 0.0, 1.0),
            ("model.rope_theta", self.model.rope_theta, 1.0, 1e12),
            ("model.norm_eps", self.model.norm_eps, 0.0, 1.0),
            ("limits.lease_s", self.limits.lease_s, 0.01, 86400.0),
            ("limits.linger_s", self.limits.linger_s, 0.0, 3600.0),
            ("limits.silent_s", self.limits.silent_s, 0.01, 3600.0),
            ("limits.ping_s", self.limits.ping_s, 0.01, 3600.0),
            ("limits.server_gone_s", self.limits.server_gone_s, 0.01, 1e6),
        ):
            if not low <= number <= high:
                raise BadInputError(f"{field}: {number} is not between {low} and {high}")
        for section in (self, *(getattr(self, name) for name in self.__struct_fields__)):
            for field in getattr(section, "__struct_fields__", ()):
                text = getattr(section, field)
                if isinstance(text, str) and not is_printable(text):
                    raise BadInputError(f"{field}: {text!r} holds control characters")
        if not self.name or len(self.name) > 63 or self.name.strip("abcdefghijklmnopqrstuvwxyz0123456789-"):
            raise BadInputError(f"name: {self.name!r} is not 1 to 63 lower-case letters, digits and dashes")
        if len(self.description) > DESCRIPTION_MAX:
            raise BadInputError(f"description: has {len(self.description)} characters; at most {DESCRIPTION_MAX}")
        if self.model.hidden % self.model.heads or (self.model.hidden // self.model.heads) % 2:
            raise BadInputError("model.hidden: must be an even multiple of model.heads")
        if self.model.heads % self.model.kv_heads:
            raise BadInputError("model.kv_heads: must divide model.heads")
        if self.stages.count:
            check_course_keys(self)
        else:
            check_cut_of_auto(self)
            if not possible_counts(self, STAGES_MAX):
                raise BadInputError('stages.count: "auto", but no number of stages fits the other keys of the run')
        check_segments(self)
        if self.checkpoint.is_url:
            check_url("checkpoint.folder", self.checkpoint.folder)
            if self.checkpoint.folder.startswith(f"{MEMORY}:"):
                raise BadInputError("checkpoint.folder: what one process has in memory no other server can read")
        parse_mixture(self.data.mixture)
        if self.wire.activations_up == "d4":
            if self.wire.activations_down != "q8":
                raise BadInputError('wire.activations_up: "d4" needs wire.activations_down = "q8", in which sums go on')
            if self.stages.back_servers:
                raise BadInputError(
                    'wire.activations_up: "d4" needs stages.back_servers = 0: who takes an output must have the input'
                )
        elif self.wire.activations_up != self.wire.activations_down:
            raise BadInputError("wire.activations_up: must be the form of wire.activations_down: servers hand on bytes")
        if 0 < self.guard.spike <= 1:
            raise BadInputError("guard.spike: a loss over 1 time the mean and less is nothing strange; 0 is off")
        if self.limits.ping_s >= self.limits.silent_s:
            raise BadInputError("limits.ping_s: must be below limits.silent_s")


TUNED = "tuned"
"""The value of `stages.order` that leaves it to the planner."""
STAGES_MAX = 64
"""Stages of a run whose number is left open: at 64 of two servers each, another stage saves less than a hundredth."""


def possible_counts(config: RunConfig, most: int) -> list[int]:
    """The numbers of stages, up to `most`, with which the run's other keys can be: its own number, where it has one."""
    if config.stages.count:
        return [config.stages.count]
    found = []
    for count in range(1, min(most, STAGES_MAX, config.block_count) + 1):
        try:
            check_course_keys(config.settled(count))
        except BadInputError:
            continue
        found.append(count)
    return found
