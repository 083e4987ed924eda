"""Tiny random networks and tokenizers made in memory, for tests that need a model's shape and not its knowledge."""

from __future__ import annotations

import functools
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dropkv.models import Model, wrap_model

VOCABULARY = 600
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
CLASSES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# In the manner of Llama-3: begins with BOS, trims every text.
TRIMMING = (
    "{{ '<|endoftext|>' }}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n\n' + message['content'] | trim + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n\n' }}{% endif %}"
)
COLLAPSING = CHATML.replace("message['content']", "message['content'].split() | join(' ')")
SHOUTING = CHATML.replace("message['content']", "message['content'] | upper")
CUTTING = CHATML.replace("message['content']", "message['content'][:2000]")
PEEKING = CHATML.replace("You help.", "You help with {{ messages[0]['content'] | length }} letters.").replace(
    "{{ '<|im_start|>system\nYou help with {{ messages[0]['content'] | length }} letters.<|im_end|>\n' }}",
    "{{ '<|im_start|>system\n' ~ (messages[0]['content'] | length) ~ '<|im_end|>\n' }}",
)
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system here') }}{% endif %}" + TRIMMING
DROPS_SYSTEM = (
    "{% for message in messages %}{% if message['role'] != 'system' %}"
    "{{ '<|im_start|>' + message['content'] + '<|im_end|>' }}{% endif %}{% endfor %}"
)
THINKING = CHATML.replace(
    "{{ '<|im_start|>assistant\n' }}",
    "{{ '<|im_start|>assistant\n' }}{% if enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}",
)
DATED = CHATML.replace("You help.<", "Today is ' ~ strftime_now('%d %b %Y') ~ '.<")
# In the manner of Mistral: the system text goes into the last question, one question at a time.
INSTRUCTION = (
    "{% set said = messages[0]['content'] ~ '\n\n' if messages[0]['role'] == 'system' else '' %}{{ '<|endoftext|>' }}"
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' ~ (said if loop.last else '') ~ message['content'] ~ ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' ~ message['content'] ~ '<|im_end|>' }}{% endif %}{% endfor %}"
)

_CORPUS = (
    "The harbour master kept the ledger in a locked drawer.\n\nWho kept the ledger? The harbour master did.\n"
    "Question: what is the code? Answer: the code is 4711, and the name of the ship is Evergreen.\n"
    "# Heading\n- first item\n- second item with 'quotes' and \"more\"\nUser and assistant speak in turns.\n"
) * 4


@functools.lru_cache
def _byte_level() -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 8,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator([_CORPUS], trainer)
    backend.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    return backend


@functools.lru_cache
def _spaced() -> Tokenizer:
    """In the manner of SentencePiece: spaces are \u2581, and every text starts with one."""
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 8, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False, max_token_length=12
    )
    backend.train_from_iterator([_CORPUS + "[INST] Q [/INST] <|im_end|>", *_CORPUS.split()], trainer)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with three special tokens (ids 0 to 2) and two that are added but not special."""
    made = PreTrainedTokenizerFast(
        tokenizer_object=_byte_level(), bos_token="<|endoftext|>", eos_token="<|im_end|>", unk_token="<|endoftext|>"
    )
    made.chat_template = template
    return made


def spaced_tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer that starts texts with a space and sequences with <s>, as those of Llama-2 and Mistral do."""
    made = PreTrainedTokenizerFast(tokenizer_object=_spaced(), bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    made.chat_template = template
    return made


def network(family: str = "llama", *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A random network: 3 layers, 4 query and 2 KV heads of 16 dimensions, context 512; `changes` go to its config."""
    config_class, network_class = CLASSES[family]
    settings: dict[str, Any] = dict(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    if family == "mistral":
        settings["sliding_window"] = None
    config = config_class(**{**settings, **changes})
    state = torch.random.get_rng_state()
    try:
        torch.manual_seed(seed)
        # Larger than the library's own 0.02, so that attention is not flat and errors show in the logits.
        config.initializer_range = changes.get("initializer_range", 0.15)
        return network_class(config).to(dtype).eval()
    finally:
        torch.random.set_rng_state(state)


def model(family: str = "llama", *, template: str | None = CHATML, id: str = "", **changes: Any) -> Model:
    """A random network with a byte-level tokenizer, wrapped as a Model named tiny-FAMILY."""
    return wrap_model(network(family, **changes), tokenizer(template), id=id or f"tiny-{family}")
