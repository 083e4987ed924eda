"""Tiny random networks and tokenizers made in memory, for tests that need a model's shape and not its knowledge."""

from __future__ import annotations

import functools
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedTokenizerFast

from dropkv.models import Model, wrap_model

VOCABULARY = 600
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
WINDOW = 24  # tokens of the sliding layers below
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=32)


def longrope(original: int, short: float = 1.0, long: float = 3.0) -> dict[str, Any]:
    """Config of two sets of frequencies, up to `original` tokens and beyond."""
    steps = 6  # half of 16 dimensions * 0.75
    return {
        "original_max_position_embeddings": original,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": original,
            "short_factor": [short + 0.1 * step for step in range(steps)],
            "long_factor": [long + step for step in range(steps)],
        },
    }


# Every family that is tested: a name, the model type, and what its config has beside that of `network`.
BREADTH: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    "llama-yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "rope_theta": 1e4,
            }
        },
    ),
    "llama-3.1": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
                "rope_theta": 1e4,
            }
        },
    ),
    "llama-dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}}),
    "mistral": ("mistral", {}),
    "mistral-sliding": ("mistral", {"sliding_window": WINDOW}),
    "ministral": ("ministral", {"sliding_window": WINDOW, "layer_types": MIXED}),
    "qwen2": ("qwen2", {}),
    "qwen2-sliding": ("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "phi": ("phi", {"num_key_value_heads": 4, "partial_rotary_factor": 0.5}),
    "phi3": ("phi3", {"partial_rotary_factor": 0.75}),
    "phi3-longrope-short": ("phi3", {"partial_rotary_factor": 0.75, **longrope(400)}),
    "phi3-longrope-long": ("phi3", {"partial_rotary_factor": 0.75, **longrope(64)}),
    "phi3-sliding": ("phi3", {"sliding_window": WINDOW}),
    "gemma": ("gemma", {}),
    "gemma2": (
        "gemma2",
        {
            "sliding_window": WINDOW,
            "layer_types": MIXED,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 9.0,
            "query_pre_attn_scalar": 8,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            "sliding_window": WINDOW,
            "layer_types": MIXED,
            "query_pre_attn_scalar": 8,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "cohere": ("cohere", {"logit_scale": 1.0, "use_qk_norm": True}),
    "cohere2": ("cohere2", {"logit_scale": 1.0, "sliding_window": WINDOW, "layer_types": MIXED}),
    "exaone4": ("exaone4", {"sliding_window": WINDOW, "layer_types": MIXED}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1]}),
    "afmoe": (
        "afmoe",
        {
            **EXPERTS,
            "num_experts": 4,
            "num_shared_experts": 1,
            "num_dense_layers": 1,
            "sliding_window": WINDOW,
            "layer_types": MIXED,
        },
    ),
    "olmo": ("olmo", {"clip_qkv": 2.0}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"sliding_window": WINDOW, "layer_types": MIXED}),
    "gpt-neox": ("gpt_neox", {"num_key_value_heads": None, "rotary_pct": 0.25}),
    "stablelm": ("stablelm", {"partial_rotary_factor": 0.25, "use_parallel_residual": True, "qk_layernorm": True}),
    "nemotron": ("nemotron", {}),
    "granite": (
        "granite",
        {
            "attention_multiplier": 0.2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.0,
        },
    ),
    "glm": ("glm", {}),
    "glm4": ("glm4", {}),
    "starcoder2": ("starcoder2", {"sliding_window": None}),
    "seed-oss": ("seed_oss", {}),
    "hunyuan": ("hunyuan_v1_dense", {}),
    "ernie4.5": ("ernie4_5", {}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "router_jitter_noise": 0.1}),
    "qwen2-moe": ("qwen2_moe", {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 32}),
    "qwen3-moe": ("qwen3_moe", {**EXPERTS, "num_experts": 4}),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "granite-moe": ("granitemoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "attention_multiplier": 0.2}),
    "phi-moe": ("phimoe", {"num_local_experts": 4}),
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
    """A random network of a family of `BREADTH`: 3 layers, 4 query and 2 KV heads of 16 dimensions, context 512.

    `changes` go to its config.
    """
    kind, own = BREADTH[family]
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
    config = CONFIG_MAPPING[kind](**{**settings, **own, **changes})
    state = torch.random.get_rng_state()
    try:
        torch.manual_seed(seed)
        # Larger than the library's own 0.02, so that attention is not flat and errors show in the logits.
        config.initializer_range = changes.get("initializer_range", 0.15)
        if dtype == torch.float64:
            config._experts_implementation = "eager"  # the grouped product has no float64
        made = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).to(dtype).eval()
        if family not in FAMILIES:
            vary(made)
        return made
    finally:
        torch.random.set_rng_state(state)


def vary(network: Any) -> None:
    """Biases and norms away from their 0 and 1, so that leaving one out shows."""
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn_like(parameter)


def model(family: str = "llama", *, template: str | None = CHATML, id: str = "", **changes: Any) -> Model:
    """A random network with a byte-level tokenizer, wrapped as a Model named tiny-FAMILY."""
    return wrap_model(network(family, **changes), tokenizer(template), id=id or f"tiny-{family}")
