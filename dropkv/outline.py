"""A model without its weights: what an estimate needs, in a second, however large the model is."""

from __future__ import annotations

from dropkv.checkpoints import BUNDLED, find_checkpoint
from dropkv.models import Model, chosen_device, chosen_dtype, geometry_of, refuse_unsupported, rope_of


def load_outline(
    name: str = BUNDLED, *, revision: str | None = None, dtype: str = "auto", device: str = "auto"
) -> Model:
    """A Model whose network has shapes and no numbers (torch's meta device), so that it can be measured but not run.

    Arguments as for `load_model`. Of a Hub model that is not here, only configuration and tokenizer are fetched. Raises ModelError,
    UsageError.
    """
    wanted, place = chosen_dtype(dtype), chosen_device(device)
    from dropkv import attention
    from dropkv.loading import load_empty, read_config

    checkpoint = find_checkpoint(
        name, revision, lambda folder: refuse_unsupported(read_config(folder, None, name)), weights=False
    )
    attention.register()
    network, tokenizer = load_empty(checkpoint, wanted, place, refuse_unsupported)
    return Model(
        network=network,
        tokenizer=tokenizer,
        id=checkpoint.id,
        source=checkpoint.source,
        revision=checkpoint.revision,
        device=place,
        dtype=next(network.parameters()).dtype,
        geometry=geometry_of(network.config),
        max_positions=int(network.config.max_position_embeddings),
        stop_ids=frozenset(),
        rope=rope_of(network.config),
    )
