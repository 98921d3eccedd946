// What the tab keeps until it is closed; in a browser that lets pages keep nothing, until the page is left.

const inMemory = new Map();
const storage = (() => {
  try {
    return sessionStorage;
  } catch {
    return { getItem: (name) => inMemory.get(name) ?? null, setItem: (name, text) => inMemory.set(name, text), removeItem: (name) => inMemory.delete(name) };
  }
})();

export default storage;
