"""Exports for programs that do not read safetensors: GGUF for llama.cpp, and Modelfiles for
Ollama.
"""
