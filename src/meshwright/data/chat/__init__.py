"""Chats as training data: formats of chats, the model's chat template, and a loss weight for each token.

conversation    records of any chat format as turns
turns           one message as a turn: role, text, calls of tools, loss weight
values          what is inside their messages: calls of tools, JSON text, null
template        the chat template of a tokenizer, rendered in a sandbox
targets         tokens of a conversation, and which of them are trained
turn_ends       where a turn ends: its end-of-turn token
mask_errors     refusals of answers whose tokens cannot be found
rows            records of .jsonl, .json, .parquet files and Hugging Face datasets on disk
pack            all of it, into a packed dataset with loss weights
"""
