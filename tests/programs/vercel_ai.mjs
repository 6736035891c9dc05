import assert from 'node:assert/strict'
import { createAnthropic } from '@ai-sdk/anthropic'
import { createOpenAI } from '@ai-sdk/openai'
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { generateText, isStepCount, Output, streamText, tool } from 'ai'
import { z } from 'zod'

const settings = { baseURL: `${process.env.URL}/v1`, apiKey: process.env.KEY }
const openai = createOpenAI(settings)
const providers = {
  responses: openai,
  chat: openai.chat,
  anthropic: createAnthropic(settings),
  compatible: createOpenAICompatible({ ...settings, name: 'penstock', supportsStructuredOutputs: true }),
}
const weather = tool({
  description: 'How warm it is in a city',
  inputSchema: z.object({ city: z.string() }),
  execute: ({ city }) => `${city}: 18 degrees`,
})
const schema = z.object({ city: z.enum(['Oslo', 'Rome']), warm: z.boolean() })

for (const [api, provider] of Object.entries(providers)) {
  try {
    await converse(provider)
  } catch (error) {
    throw new Error(`${api}: ${error.message} ${error.responseBody ?? ''}`, { cause: error })
  }
}
console.log(`tools, a second turn and JSON by a schema: ${Object.keys(providers).join(', ')}`)

async function converse(provider) {
  const options = { model: provider('scripted'), tools: { weather }, stopWhen: isStepCount(4), maxRetries: 0 }
  const messages = [{ role: 'user', content: 'How warm is it in Rome?' }]
  const first = streamText({ ...options, messages, onError: ({ error }) => { throw error } })
  assert.equal(await first.text, 'It is warm.')
  assert.equal((await first.steps).length, 2)

  // what came before is sent as the SDK keeps it: over the Responses API as references to stored items
  const history = [...messages, ...(await first.responseMessages), { role: 'user', content: 'And now?' }]
  assert.equal((await generateText({ ...options, messages: history })).text, 'It is warm.')

  const asked = { model: provider('penstock-demo'), prompt: 'Is it warm in Rome?', maxRetries: 0 }
  const { output } = await generateText({ ...asked, output: Output.object({ schema }) })
  assert.equal(typeof output.warm, 'boolean')
}
