"""Models from folders of Hugging Face's format, with caches of keys."""

import numpy as np
import pytest
from safetensors.numpy import save_file

from holmesjax.config import ModelConfig
from holmesjax.errors import ConfigError
from holmesjax.generation.decoder import Decoder, on_devices
from holmesjax.generation.sampler import Sampler
from holmesjax.hugging_face import folder
from launch.__main__ import main
from tests.data.trained_tokenizers import write_bpe, write_corpus
from tests.generation.odd_models import extended
from tests.hugging_face.families import CONFIGS, tensors_of, write_config
from tests.one_device import logits_of

QUICK = "gemma3_text"  # has windows and no windows, with rotary bases of their own
OTHERS = [pytest.param(f, marks=pytest.mark.exhaustive) for f in CONFIGS if f != QUICK]


def write_folder(path, family, **changes):
    write_config(path, family, **changes)
    model = ModelConfig(**folder.settings_of(str(path)))
    save_file(tensors_of(family, model), path / folder.WEIGHTS)
    return model


@pytest.mark.parametrize("family", [QUICK, *OTHERS])
def test_a_family_has_the_same_logits_with_caches(family, tmp_path):
    """Prompts and single tokens, beyond the windows that a family has."""
    model = write_folder(tmp_path, family)
    weights = folder.open_weights(tmp_path, model)
    decoder = Decoder.built(model, on_devices(model), weights.read)
    token_BL = np.array([[(7 * i + 3) % 96 for i in range(24)]], np.int32)
    got, _ = extended(decoder, token_BL, (11, 1, 1, 11), most=32)
    want = logits_of(decoder.params, model, token_BL)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


def test_generate_reads_a_folder(tmp_path, capsys):
    """The tokenizer lies beside the weights; what is wrong is told before they are read."""
    path = tmp_path / "hf"
    write_folder(path, "llama", vocab_size=384, num_hidden_layers=1)
    assert main(["generate", str(path), "--prompt", "def"]) == 2
    assert "holds no tokenizer" in capsys.readouterr().err
    write_bpe(write_corpus(tmp_path / "corpus"), path)
    words = ["--prompt", "def", "--max-tokens=5", "--temperature=0"]
    assert main(["generate", str(path), *words]) == 0
    assert capsys.readouterr().out.startswith("def")
    assert main(["generate", str(path), "--as-planned"]) == 2
    assert "python -m launch import" in capsys.readouterr().err
    assert main(["generate", str(tmp_path)]) == 2
    assert "is no run folder, and no folder" in capsys.readouterr().err
    write_folder(path, "llama", vocab_size=96, num_hidden_layers=1)
    with pytest.raises(ConfigError, match=r"must be at least 300.*\n.*\n  fix: use 384"):
        Sampler.of_hugging_face(path)
