"""The tiny model's tokenizer: byte-level BPE with GLM's way of splitting text and its control tokens at the end."""

import json
import pathlib
from collections.abc import Iterable

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 3072


def _names(text: str) -> list[str]:
    return text.split()


_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,%d}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTROL = _names(
    "<|endoftext|> [MASK] [gMASK] [sMASK] <sop> <eop> <|system|> <|user|> <|assistant|> <|observation|> "
    "<|begin_of_image|> <|end_of_image|> <|begin_of_video|> <|end_of_video|> <|begin_of_audio|> <|end_of_audio|> "
    "<|begin_of_transcription|> <|end_of_transcription|> <|code_prefix|> <|code_middle|> <|code_suffix|>"
)
# Written and read as text by the parsers, so they are tokens that decoding keeps.
_TAGS = _names(
    "<think> </think> <tool_call> </tool_call> <tool_response> </tool_response> <arg_key> </arg_key> <arg_value> "
    "</arg_value> /nothink <|begin_of_box|> <|end_of_box|> <|image|> <|video|>"
)
EOS = ("<|endoftext|>", "<|user|>", "<|observation|>")


def _splitter(digits: int) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(_SPLIT % digits), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def train(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> tokenizers.Tokenizer:
    """Learns merges from `texts`. No merge joins digits, so that a number always is its digits, one token each."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = _splitter(1)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(_CONTROL) - len(_TAGS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.pre_tokenizer = _splitter(3)
    tokenizer.add_special_tokens(_CONTROL)
    tokenizer.add_tokens([tokenizers.AddedToken(tag, normalized=False, special=False) for tag in _TAGS])
    return tokenizer


def save(tokenizer: tokenizers.Tokenizer, folder: pathlib.Path, context: int) -> None:
    """Writes `tokenizer.json`, `tokenizer_config.json` and `generation_config.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "eos_token": EOS[0],
        "pad_token": EOS[0],
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    ids = [tokenizer.token_to_id(t) for t in EOS]
    generation = {"eos_token_id": ids, "pad_token_id": ids[0], "do_sample": True, "temperature": 1.0, "top_p": 0.95}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
