"""Serve a model over HTTP, as OpenAI's API has it: completions, chats and streams. `Swarm.http` begins it.

The path of a request; all but `app` and `endpoint` is pure or runs in the thread of one text::

    endpoint       uvicorn's thread ─► app  checks host and key ─► request  reads the JSON
                                        │                         prompt_tokens  makes tokens of it
                                        ▼ limits  rate, turn
    request_texts  a thread for each text ─► writing  transformers' `generate`, with `token_texts` and `stop_texts`
                                        │ pieces, one for each token
                                        ▼
    app            sends each piece, or all at the end, as JSON (`text_answer`)

================ ================================================================================
`api_error`      an error that the client gets, in OpenAI's form
`request`        what a client asks for, checked
`limits`         the turn, the queue and the rate of requests
`metrics`        counts, in Prometheus' form
`prompt_tokens`  the tokens of a prompt or of a chat
`token_texts`    the text of tokens that come one by one
`stop_texts`     the end of a text at the client's stop texts
`writing`        picks the tokens of one text
`text_answer`    the JSON of an answer and of its pieces
`request_texts`  the texts of one request, each written by a thread
`app`            the ASGI application
`endpoint`       the HTTP server, in a thread
================ ================================================================================
"""
