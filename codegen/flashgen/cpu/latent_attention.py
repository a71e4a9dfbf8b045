"""Decoding in latent space on the CPU: attention whose values are a part of its keys."""

from flashgen.cpu.attention import run

__all__ = ["run"]
