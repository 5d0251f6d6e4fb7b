"""Serve a model over HTTP, as OpenAI's API has it: completions, chats and streams. `Swarm.http` begins it.

The path of a request; all but `app` and `endpoint` is pure or runs in the thread of one text::

    endpoint  uvicorn's thread ─► app  checks host, key, size and rate ─► request  reads the JSON
                                   │                                      prompt_tokens  makes tokens of it
                                   ▼ waits for its turn (limits)
    texts     a thread for each text ─► writing  `generate` of transformers, with `token_texts` and `stop_texts`
                                   │ pieces
                                   ▼
              app  sends them at once, or all at the end, as JSON (`answers`)

================ ================================================================================
`api_error`      an error that the client gets, in OpenAI's form
`request`        what a client asks for, checked
`limits`         the turn, the queue and the rate of requests
`metrics`        counts, in Prometheus' form
`prompt_tokens`  the tokens of a prompt or of a chat
`token_texts`    the text of tokens that come one by one
`stop_texts`     the end of a text at the client's stop texts
`writing`        picks the tokens of one text
`answers`        the JSON of answers and of their pieces
`texts`          the texts of one request, each written by a thread
`app`            the ASGI application
`endpoint`       the HTTP server, in a thread
================ ================================================================================
"""
