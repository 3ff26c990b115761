"""What leaves for programs that do not read safetensors: GGUF for llama.cpp, and what Ollama needs beside it."""
