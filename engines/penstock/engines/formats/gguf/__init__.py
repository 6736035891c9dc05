"""Models in one GGUF file, as llama.cpp writes them: settings, tokenizer and quantized weights."""
