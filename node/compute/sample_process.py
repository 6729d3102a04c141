"""Lets the model of a checkpoint write a little, in a process of its own that stands back behind everything else.

python -m node.compute.sample_process PLACE STEP > JSON: {"sample": "…"} or {"why_not": "…"}
"""

from __future__ import annotations

import json
import signal
import sys

import torch

from node.compute.checkpoint import CheckpointError, read_manifest, step_folder
from node.compute.export_checkpoint import layouts_held, stage_weights, tokenizer_of
from node.compute.layout import StageLayout
from node.compute.model import DTYPES, StageModel
from node.compute.places import Place, open_place
from node.platform.priority import stand_back
from protocol.base.errors import BadInputError

PARAMETERS_MAX = 200_000_000
"""A whole model in fp32 is 0.8 GB then, beside a server that has its shard; reading all parts of a larger one would
take its disk for a minute."""
PROMPT = "The "
TOKENS = 64
"""About what a line of the page holds. Each goes through the whole model: 64 x 64 tokens of 200 M parameters are 1.6 T
operations, some ten seconds of one core."""
TEMPERATURE = 0.8


def write(folder: Place, step: int) -> str:
    """What the model writes after the prompt, the prompt included.

    Raises:
        CheckpointError: the checkpoint is not complete.
        BadInputError: its tokenizer cannot be made here, or the model is too large for this.
    """
    home = step_folder(folder, step)
    manifest = read_manifest(home)
    config = manifest.config
    whole = StageLayout.whole(config, manifest.vocabulary)
    if whole.parameter_count > PARAMETERS_MAX:
        raise BadInputError(f"a model of {whole.parameter_count:,} parameters is too large to write beside the work")
    layouts = layouts_held(home, manifest)
    weights: dict[str, torch.Tensor] = {}
    for stage, layout in enumerate(layouts):
        weights |= layout.views(stage_weights(home, manifest, layouts, stage))
    flat = torch.cat([weights[part.name].flatten() for part in whole.slices]).to(DTYPES[config.compute.dtype])
    tokenizer, model = tokenizer_of(manifest), StageModel(whole)
    tokens = [int(token) for token in tokenizer.encode(PROMPT)][: config.model.context - 1]
    dice = torch.Generator().manual_seed(step)
    while len(tokens) < min(TOKENS, config.model.context):
        scores = model.logits(flat, torch.tensor([tokens]))[0, -1].float()
        token = int(torch.multinomial(torch.softmax(scores / TEMPERATURE, 0), 1, generator=dice))
        if token == tokenizer.end_mark:
            break
        tokens.append(token)
    return tokenizer.decode(tokens)


def main(arguments: list[str]) -> None:
    # Whoever waits no longer ends this in mid work; a copy of a part, some gigabytes of a store's, would stay for good.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    stand_back()
    torch.set_num_threads(1)
    try:
        answer = {"sample": write(open_place(arguments[0]), int(arguments[1]))}
    except (CheckpointError, BadInputError, RuntimeError) as error:
        answer = {"why_not": str(error)}
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
