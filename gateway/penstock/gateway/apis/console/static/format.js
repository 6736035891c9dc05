/** Numbers as people read them. */

export const count = (value) => (value ?? 0).toLocaleString("en-US", { maximumFractionDigits: 0 });

export const rate = (value) => (value >= 100 ? count(value) : (value ?? 0).toFixed(1));

export const percent = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(0)} %` : "–");

export function seconds(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value < 0.0995) return `${(value * 1e3).toFixed(value < 0.00995 ? 2 : 1)} ms`;
  if (value < 60) return `${value.toFixed(2)} s`;
  return value < 3600 ? `${Math.floor(value / 60)} min ${Math.round(value % 60)} s` : `${(value / 3600).toFixed(1)} h`;
}

export function bytes(value) {
  if (value >= 2 ** 30) return `${(value / 2 ** 30).toFixed(1)} GiB`;
  if (value >= 2 ** 20) return `${(value / 2 ** 20).toFixed(0)} MiB`;
  return value >= 1024 ? `${(value / 1024).toFixed(0)} KiB` : `${value ?? 0} B`;
}

/** The value below which such a part of these are; null where there are none. */
export function quantile(values, part) {
  if (!values.length) return null;
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.floor(part * sorted.length))];
}

/** A tenant's name; servers without keys have one without a name. */
export const tenant = (name) => name || "(no key)";
