"""Attention over a sequence whose tokens are spread over several processes."""

from dmattn.distributed.context_parallel import context_parallel_attention
from dmattn.distributed.groups import Group

__all__ = ["Group", "context_parallel_attention"]
