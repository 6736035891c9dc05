#!/bin/sh
# Server-sent events with curl: the decoupled model, then the language model.
#   generate_stream.sh [--url http://127.0.0.1:8000]
set -eu
URL=http://127.0.0.1:8000
[ "${1:-}" != --url ] || URL=$2

echo "repeat says each number again:"
curl -sSN --fail-with-body "$URL/v2/models/repeat/generate_stream" -H 'Content-Type: application/json' \
  -d '{"IN": [1, 2, 3], "DELAY": [100, 100, 100]}'

echo "chat goes on with a text:"
curl -sSN --fail-with-body "$URL/v2/models/chat/generate_stream" -H 'Content-Type: application/json' -d '{
  "text_input": "<|im_start|>user\nWhat does os.path.join do?<|im_end|>\n<|im_start|>assistant\n",
  "stream": true, "exclude_input_in_output": true, "max_tokens": 60, "temperature": 0}'
