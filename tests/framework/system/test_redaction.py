"""Redaction: no file of a run contains a secret."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from messages import refuses
from model_script import MODEL
from models import Regressor, loader, silent_trainer
from ranks import run_script

from phalanx.framework.core.errors import PhalanxError
from phalanx.framework.system.redaction import hiding, is_secret, without_secret_options, without_secrets
from phalanx.loggers import CSVLogger, TensorBoardLogger

TOKEN = "hf_" + "a1B2c3D4e5F6g7H8"


@pytest.mark.parametrize("name", ["hf_token", "API_KEY", "apiKey", "hub-token", "wandb.key", "accessKey"])
def test_keys_and_tokens_that_look_like_credentials_are_secret(name: str) -> None:
    assert is_secret(name, TOKEN)


@pytest.mark.parametrize("name", ["password", "DB_PASSWORD", "clientSecret", "secret"])
def test_passwords_are_secret_whatever_their_value(name: str) -> None:
    assert is_secret(name, "x")
    assert not is_secret(name, "")
    assert not is_secret(name, 3)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 4096),
        ("pad_token", "<pad>"),
        ("eos_token", "<|end_of_the_text|>"),
        ("sort_key", "length"),
        ("label_key", "segmentation_mask"),
        ("prompt_token", "a text of 24 characters"),
        ("monkey", TOKEN),
        ("tokenizer", "sentence-transformers/all-minilm-l6-v2"),
        ("path", TOKEN),
    ],
)
def test_keys_and_tokens_of_training_are_not_secret(name: str, value: object) -> None:
    assert not is_secret(name, value)


def test_nested_secrets_are_masked() -> None:
    params = {"lr": 0.1, "hub": {"token": TOKEN, "name": "x"}, "of": Namespace(password="p")}
    assert without_secrets(params) == {"lr": 0.1, "hub": {"token": "***", "name": "x"}, "of": {"password": "***"}}


def test_values_of_secret_variables_are_masked_in_a_text() -> None:
    hide = hiding({"MY_TOKEN": "abcdef", "API_KEY": "abcdefgh", "KEY_SHORT": "abc", "HOME": "/home/abc"})
    assert hide("abc abcdef /home/abc abcdefgh") == "abc *** /home/abc ***"
    assert hiding({"HOME": "/root"})("/root") == "/root"


class Hub(Regressor):
    def __init__(self, hub_token: str, options: Any = None, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_no_file_of_a_run_contains_a_secret(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = silent_trainer(
        max_steps=2,
        logger=[CSVLogger(tmp_path), TensorBoardLogger(tmp_path)],
        enable_checkpointing=True,
        default_root_dir=tmp_path,
    )
    trainer.fit(Hub(TOKEN, {"db": {"password": "hunter2-hunter2"}}), loader())
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"hparams.yaml", "config.json", "manifest.json"} <= {path.name for path in files}
    for path in files:
        data = path.read_bytes()
        assert TOKEN.encode() not in data, path
        assert b"hunter2" not in data, path
    # What is left out of a checkpoint is told, and asked for when it is loaded.
    assert "do not hold the hyperparameters hub_token, options" in " ".join(capsys.readouterr().out.split())
    (saved,) = tmp_path.rglob("*.ckpt")
    with refuses(PhalanxError, "hub_token="):
        Hub.load_from_checkpoint(saved)
    loaded = Hub.load_from_checkpoint(saved, hub_token="another", options=None)
    assert loaded.hparams["width"] == 3


SCRIPT = f"""{MODEL}
class Telling(Model):
    def on_train_batch_end(self, *_):
        print("it is", os.environ["HUB_TOKEN"], flush=True)
        if self.global_rank == 1:
            raise RuntimeError("refused with " + os.environ["HUB_TOKEN"])

if __name__ == "__main__":
    trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp", max_steps=2, default_root_dir=sys.argv[1])
    trainer.fit(Telling(), loader(32))
"""


def test_failed_ranks_write_no_secret(tmp_path: Path) -> None:
    done = run_script(SCRIPT, str(tmp_path), env={"HUB_TOKEN": TOKEN})
    assert done.returncode == 1
    assert "RuntimeError: refused with ***" in done.stdout
    logs = {path.name: path.read_text() for path in tmp_path.rglob("rank_*.log")}
    assert len(logs) == 2
    assert all("it is ***" in text for text in logs.values())
    assert not any(TOKEN in text for text in logs.values())


def test_the_values_of_secret_options_are_hidden() -> None:
    given = f"python a.py --api-key abc --password=x y --hf_token {TOKEN} --pad-token '<pad>' --sort-key name --lr 0.1"
    shown = without_secret_options(given)
    assert shown == (
        "python a.py --api-key '***' '--password=***' y --hf_token '***' --pad-token '<pad>' --sort-key name --lr 0.1"
    )
    assert without_secret_options("python 'train.py") == "python 'train.py"
