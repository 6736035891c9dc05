"""The paged KV cache's book-keeping: blocks, pool, prefix cache, block tables. Block ids only, never tensors."""

from penstock.kvcache.cache_log import BlocksRemoved, BlocksStored, CacheCleared, CacheEntry, CacheLog
from penstock.kvcache.hashing import Attachment, BlockHasher, HashChain
from penstock.kvcache.hybrid import HybridCacheManager, cache_manager
from penstock.kvcache.integrity import IntegrityError
from penstock.kvcache.manager import KVCacheManager
from penstock.kvcache.pool import BlockHash, BlockPool
from penstock.kvcache.retention import Retention
from penstock.kvcache.states import StateGroup
from penstock.kvcache.table import NO_BLOCK, BlockTables, Growth, KVGroup, largest_chunk, longest_request
from penstock.kvcache.tier import BlockSave, BlockSource, BlockTier

__all__ = [
    "NO_BLOCK",
    "Attachment",
    "BlockHash",
    "BlockHasher",
    "BlockPool",
    "BlockSave",
    "BlockSource",
    "BlockTables",
    "BlockTier",
    "BlocksRemoved",
    "BlocksStored",
    "CacheCleared",
    "CacheEntry",
    "CacheLog",
    "Growth",
    "HashChain",
    "HybridCacheManager",
    "IntegrityError",
    "KVCacheManager",
    "KVGroup",
    "Retention",
    "StateGroup",
    "cache_manager",
    "largest_chunk",
    "longest_request",
]
