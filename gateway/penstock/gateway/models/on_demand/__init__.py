"""Models that are loaded when a request asks for them, and unloaded when others need their memory."""
