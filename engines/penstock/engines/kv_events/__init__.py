"""Events about the prefix cache, for routers that send a request where its beginning is cached: published as vLLM does
over ZeroMQ (vllm/distributed/kv_events.py), and followed at other servers."""
