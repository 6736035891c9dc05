import assert from 'node:assert/strict'
import OpenAI from 'openai'
import { zodResponseFormat } from 'openai/helpers/zod'
import { z } from 'zod'

const client = new OpenAI({ baseURL: `${process.env.URL}/v1`, apiKey: process.env.KEY, maxRetries: 0 })
const model = 'penstock-demo'
const messages = [{ role: 'user', content: 'What does os.path.join do?' }]

let text = ''
for await (const chunk of await client.chat.completions.create({ model, messages, stream: true })) {
  text += chunk.choices[0]?.delta?.content ?? ''
}
assert.match(text, /os\.path\.join/)

const calls = []
const weather = {
  name: 'weather',
  parse: JSON.parse,
  function: ({ city }) => { calls.push(city); return '18 degrees' },
  parameters: {
    type: 'object',
    properties: { city: { type: 'string', enum: ['Oslo', 'Rome'] } },
    required: ['city'],
    additionalProperties: false,
  },
}
const tools = [{ type: 'function', function: weather }]
const tool_choice = { type: 'function', function: { name: 'weather' } }
await client.chat.completions.runTools({ model, messages, tools, tool_choice }).done()
assert.ok(calls.length === 1 && ['Oslo', 'Rome'].includes(calls[0]))

const response_format = zodResponseFormat(z.object({ city: z.enum(['Oslo', 'Rome']), warm: z.boolean() }), 'weather')
const parsed = await client.chat.completions.parse({ model, messages, response_format })
assert.equal(typeof parsed.choices[0].message.parsed.warm, 'boolean')

const first = await client.responses.create({ model, input: messages[0].content })
assert.match(first.output_text, /os\.path\.join/)
const second = await client.responses.create({ model, input: 'And os.path.split?', previous_response_id: first.id })
assert.match(second.output_text, /os\.path\.split/)
console.log('openai: streams, a tool that is run, parsed JSON, responses that continue a stored one')
