"""The models of a server: language models, repositories, other servers' models, names that several models serve."""
