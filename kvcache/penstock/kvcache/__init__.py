"""The paged KV cache's book-keeping: blocks, pool, prefix cache, block tables. Block ids only, never tensors."""

from penstock.kvcache.hashing import BlockHasher
from penstock.kvcache.manager import KVCacheManager
from penstock.kvcache.pool import BlockPool, IntegrityError
from penstock.kvcache.table import BlockTable, Growth

__all__ = ["BlockHasher", "BlockPool", "BlockTable", "Growth", "IntegrityError", "KVCacheManager"]
