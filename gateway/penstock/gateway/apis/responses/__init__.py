"""The Responses API: https://platform.openai.com/docs/api-reference/responses. It is built on the chat front, which is
given most of a request as a ChatRequest, and checks it."""
