"""Chat templates for tests of several interfaces."""

# Thoughts stand before a text, and begin an answer unless the request says otherwise.
THINKING = (
    "{% for m in messages %}[{{ m.role }}] "
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}</think>\n\n{% endif %}"
    "{{ m.content }}\n{% endfor %}"
    "[assistant] {% if enable_thinking is not defined or enable_thinking %}<think>\n{% endif %}"
)
