"""Folders of config.json and safetensors."""
