"""flashgen as an attention backend of vLLM, outside its tree. NEVER RUN in a vLLM server: tests check it
against vLLM's interface alone.

vLLM calls `register` in each of its processes, by the entry point "vllm.general_plugins". Then
``vllm serve ... --attention-backend CUSTOM`` takes flashgen for the decoder layers of a model.
"""

from __future__ import annotations

import logging

_BACKEND = "flashgen.compat.vllm_backend.FlashgenBackend"


def register() -> None:
    """Offer flashgen as vLLM's backend CUSTOM, the name that vLLM keeps for others. Where another package has
    taken the name, it stays there, with a warning.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum.CUSTOM
    if not custom.is_overridden():
        register_backend(custom, _BACKEND)
    elif custom.get_path() != _BACKEND:  # vLLM may call this more than once
        logging.getLogger(__name__).warning(
            "vLLM's attention backend CUSTOM is %s; flashgen leaves it", custom.get_path()
        )
