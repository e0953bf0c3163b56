"""Inputs that nobody should give a model runner, numbered as in the project's table of them.

| rows | input | file |
|---|---|---|
| 1-14, 23 | GGUF headers: cut, huge counts, bad types, shapes and offsets | test_header |
| 15-17, 20 | architecture, hyperparameters, tensors, weights that are not finite | test_model |
| 18, 19 | vocabularies | tests/tokenizer |
| 21 | split files | tests/formats |
| 22 | paths that are not models, files that shrink while they are read | test_files |
| 24 | chat templates | tests/tokenizer/test_chat_template |
| 25 | prompts | test_prompts |
| 26 | session files, and a full disk when one is saved | tests/engine/test_session_file |
| 28 | options | tests/cli/test_bad_input |
| 29 | limits of the machine, interrupts, closed streams | test_resources |

Every refusal goes through the command line: one line on stderr that names the cause, the exit
code, no traceback, no large allocation.
"""
