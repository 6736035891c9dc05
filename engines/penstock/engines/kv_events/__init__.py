"""Events about the prefix cache, for routers that send a request where its beginning is cached: as vLLM publishes them
over ZeroMQ (vllm/distributed/kv_events.py)."""
