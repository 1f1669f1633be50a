"""The HTTP face of Unison: OpenAI's and Anthropic's protocols over one backend that speaks token ids.

    app.py            the ASGI application: routes, and what every route has in common
    routing.py        what a handler is given, and how a request becomes a reply or an error
    settings.py       every constant of the server
    backend.py        what the server asks of the engine behind it
    kinds.py          kinds of JSON values: how each is checked, and its JSON schema
    fields.py         the tables of request fields, shared by checking and by /openapi.json
    openapi.py        /openapi.json, made from the same tables
    schemas.py        JSON schemas of the answers
    openai_chat.py    /v1/chat/completions
    openai_text.py    /v1/completions
    openai_shape.py   what both have in common: models, logprobs, usage
    anthropic.py      /v1/messages and /v1/messages/count_tokens
    anthropic_messages.py   Anthropic's conversations as chat messages
    chat.py           a conversation and its tools as the token ids of a prompt
    messages.py       OpenAI's conversations as chat messages
    tool_parser.py    tool calls out of generated text
    sampling.py       from request fields to sampling parameters
    vocabulary.py     token ids to text and back
    text.py           incremental detokenizing and stop strings, without any input or output
    choice.py         one completion on its way to text
    generation.py     all completions of one HTTP request, awaited together
    replies.py        errors in each provider's words, server-sent events, clients that hang up
    admission.py      how many requests may be inside at once
    policy.py         /v1/policy
    probes.py         /health, /ready, /metrics
    tokens.py         /tokenize and /detokenize
    metrics.py        what the server counts, and the engine's counters beside it

Knows the engine only through `backend.Backend`, and no process: whoever runs it gives it a backend and a tokenizer.
"""
