"""Chats as training data: formats of chats, the model's chat template, and a loss weight for each token.

conversation    records of any chat format as turns
template        the chat template of a tokenizer, rendered in a sandbox
targets         tokens of a conversation, and which of them are trained
rows            records of .jsonl, .json, .parquet files and Hugging Face datasets on disk
pack            all of it, into a packed dataset with loss weights
"""
