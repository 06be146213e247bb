"""No network, and folders of the tests' own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def own_folders(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A cache of the session's own, unless the caller named one."""
    os.environ.setdefault("PERSONALPEFT_CACHE", str(tmp_path_factory.mktemp("cache")))
    os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture
def card(tmp_path: Path) -> Path:
    """A tiny model with random weights, a token for each byte, that learns fast."""
    path = tmp_path / "tiny-quick.toml"
    path.write_text(CARD)
    return path


CARD = """\
name = "tiny-t2t"
title = "A tiny model that learns in a second"
licence = "Apache-2.0"
context = 1024
stop_tokens = ["<|im_end|>"]
targets = ["q_proj", "v_proj", "down_proj"]
template = '''
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
'''

[source]
kind = "random"
seed = 7

[source.shape]
hidden = 64
intermediate = 128
blocks = 2
heads = 4
kv_heads = 2

[sampling]
max_tokens = 8

[learning]
rank = 8
alpha = 32.0
steps = 60
batch = 8
learning_rate = 0.02
anchors = 0

[gate]
kl = 100

[practice]
rounds = 25
imitate = 0
pool = 16
held_back = 8
longest = 16
learning_rate = 0.005
"""
