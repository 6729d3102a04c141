"""The validation of a run of real processes is that of its exported model, as `transformers` computes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from node.data.dataset import Dataset
from protocol.run.config_file import change_run, load_run
from tests.integration.test_demo import demo

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
EXACT = ("wire.activations_up=fp32", "wire.activations_down=fp32", "wire.parameters=fp32", "wire.gradients=gi")
VALIDATION = ("validation.every_steps=10", "validation.batches=3")


def test_validation_is_the_loss_of_the_exported_model(tmp_path: Path) -> None:
    """While volunteers die: the seed's, every tenth and the last version are validated, each to the last bit as in one
    process; and the last one is, to 1e-5, what `transformers` says of the exported model."""
    from transformers import LlamaForCausalLM

    settings = [word for key in (*EXACT, *VALIDATION) for word in ("--set", key)]
    found = demo(tmp_path, "--chaos", "3", "--kill-server", "12", *settings)
    expected = demo(tmp_path, "--reference", *settings)
    assert list(found["validations"]) == ["0", "10", "20", "30", "40"] and found["kills"] >= 3
    assert json.dumps(found["validations"]) == json.dumps(expected["validations"])
    config = change_run(load_run(tmp_path / "RUN.toml"), [*EXACT, *VALIDATION])
    dataset = Dataset(config)
    model = LlamaForCausalLM.from_pretrained(found["model"], dtype=torch.float32)
    losses = []
    for index in range(config.validation.batches):
        tokens, labels = (torch.from_numpy(array).long() for array in dataset.validation_batch(index))
        with torch.no_grad():
            logits = model(input_ids=tokens).logits
        losses.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).item())
    assert found["validations"]["40"] == pytest.approx(sum(losses) / len(losses), abs=1e-5)
    assert found["validations"]["40"] < found["validations"]["0"] - 0.5


def test_every_version_that_the_file_asks_for_is_validated_up_to_the_last(tmp_path: Path) -> None:
    """With a delay no step runs on the last two versions: each is validated behind the others, as in one process."""
    settings = ("--steps", "5", "--set", "validation.every_steps=1", "--set", "validation.batches=2")
    found = demo(tmp_path, *settings)
    expected = demo(tmp_path, "--reference", *settings)
    assert list(found["validations"]) == ["0", "1", "2", "3", "4", "5"]
    assert json.dumps(found["validations"]) == json.dumps(expected["validations"])
