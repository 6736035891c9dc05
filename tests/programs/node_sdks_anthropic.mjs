import assert from 'node:assert/strict'
import Anthropic from '@anthropic-ai/sdk'

const client = new Anthropic({ baseURL: process.env.URL, apiKey: process.env.KEY, maxRetries: 0 })
const model = 'penstock-demo', max_tokens = 200
const messages = [{ role: 'user', content: 'What does os.path.join do?' }]

const streamed = await client.messages.stream({ model, max_tokens, messages }).finalText()
assert.match(streamed, /os\.path\.join/)

const input_schema = {
  type: 'object',
  properties: { city: { type: 'string', enum: ['Oslo', 'Rome'] } },
  required: ['city'],
  additionalProperties: false,
}
const weather = { name: 'weather', description: 'How warm it is in a city', input_schema }
const tool_choice = { type: 'tool', name: 'weather' }
const call = await client.messages.create({ model, max_tokens, messages, tools: [weather], tool_choice })
assert.equal(call.stop_reason, 'tool_use')
const [used] = call.content.filter((block) => block.type === 'tool_use')
const result = { type: 'tool_result', tool_use_id: used.id, content: '18 degrees' }
const later = [...messages, { role: 'assistant', content: call.content }, { role: 'user', content: [result] }]
const answer = await client.messages.create({ model, max_tokens, messages: later, tools: [weather] })
assert.ok(answer.content.length)
assert.ok((await client.messages.countTokens({ model, messages: later, tools: [weather] })).input_tokens > 20)

const calls = []
const run = ({ city }) => { calls.push(city); return '18 degrees' }
const tools = [{ ...weather, run }]
await client.beta.messages.toolRunner({ model, max_tokens, messages, tools, tool_choice, max_iterations: 2 })
assert.ok(calls.length && ['Oslo', 'Rome'].includes(calls[0]))
console.log('anthropic: streams, a tool and its result, the tool runner, counted tokens')
