"""KV files on the Hugging Face Hub: addresses, reading whole files and parts of them, uploading.

Nothing here imports huggingface_hub before it is used.
"""
