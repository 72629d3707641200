"""A checkpoint with everything unusual at once, as a user serves it: what is told at the start, what is answered."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from moeray.worker.messages import SamplingParams
from tests.support.elastic import Elastic
from tests.support.quantized import fp8_config, save_quantized, to_fp8
from tests.support.ranks import RankSet
from tests.support.serving import Serve, client

PROMPT = [7, 11, 13, 17, 19]
UNUSED_TOKEN = 319


def odd_checkpoint(directory: Path) -> tuple[Path, list[int]]:
    """Quantised, without a tokenizer, with NaNs that no prompt meets and greedy by default; and what it says."""
    path, decoded = save_quantized(directory, to_fp8(), fp8_config())
    tensors = load_file(path / "model.safetensors")
    tensors["model.embed_tokens.weight"][UNUSED_TOKEN] = torch.nan
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    defaults = {"do_sample": False, "max_new_tokens": 9, "num_beams": 2}
    (path / "generation_config.json").write_text(json.dumps(defaults))
    with RankSet(decoded, 1) as ranks:
        (generated,) = ranks.generate([PROMPT], SamplingParams(max_tokens=9, temperature=0.0))
    assert UNUSED_TOKEN not in generated.tokens
    return path, generated.tokens


def test_an_odd_checkpoint_is_served_and_what_is_odd_is_told(tmp_path: Path) -> None:
    path, expected = odd_checkpoint(tmp_path)
    with Serve(tmp_path, path, "--workers", "2", "--kv-cache-gib", "0.1") as serve:
        url = serve.url()
        for words in (
            "Each loaded 0.4 MiB of weights in ",
            "MiB of private memory.",
            "Requests that do not say it otherwise: greedy, max_tokens 9 (generation_config.json; --generation-config",
            "generation_config.json has settings without effect here: num_beams=2.",
            "No text: this checkpoint has no tokenizer.json, so only token ids are served",
            "The checkpoint has NaNs or infinities in model.embed_tokens.weight: ",
            '"input_ids": [1, 2, 3]',
        ):
            assert serve.output.count(words) == 1, (words, serve.output)
        with client(url) as http:
            elastic = Elastic(url, http)
            for size in (2, 3, 1):
                elastic.at_size(size)
                answer = http.post("/generate", json={"input_ids": PROMPT}).json()
                assert answer["token_ids"] == expected
            refused = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})
            assert refused.status_code == 400
            assert "only token ids are served" in refused.json()["error"]["message"]
