// Images and videos that the state shows, where the model reads them.
import { html, useRef, useState } from "./dom.js";
import { changeDraft } from "./draft.js";
import { bytes } from "./format.js";
import { Text } from "./ui.js";

const TYPES = {
  image: ["image/png", "image/jpeg", "image/webp"],
  video: ["video/mp4", "video/quicktime", "video/webm", "video/x-matroska"],
};

export function Pictures({ files, model }) {
  const [refused, setRefused] = useState("");
  const input = useRef();
  const kinds = ["image", "video"].filter((kind) => model?.modalities.includes(kind));
  if (!kinds.length) return null;
  const add = async (chosen) => {
    const { added, told } = await readAll([...chosen], kinds, model.limits, files.length);
    setRefused(told);
    if (added.length) changeDraft(({ files }) => ({ files: [...files, ...added] }));
  };
  const drop = (event) => {
    event.preventDefault();
    add(event.dataTransfer.files);
  };
  const what = kinds.length === 2 ? "images or videos" : "images";
  return html`<div class="pictures" onDragOver=${(event) => event.preventDefault()} onDrop=${drop}>
    ${files.map(
      (file) => html`<figure key=${file.id} class="picture">
        ${file.kind === "image" ? html`<img src=${file.url} alt="" />` : html`<span class="film" aria-hidden="true">video</span>`}
        <figcaption><${Text} value=${file.name} /> <span class="hint">${bytes(file.size)}</span></figcaption>
        <button type="button" class="quiet icon" aria-label=${`Remove ${file.name}`}
          onClick=${() => changeDraft(({ files }) => ({ files: files.filter((one) => one.id !== file.id) }))}><span aria-hidden="true">×</span></button>
      </figure>`,
    )}
    <label class="picker">
      <input ref=${input} type="file" multiple class="unseen" accept=${kinds.flatMap((kind) => TYPES[kind]).join(",")}
        onChange=${(event) => add(event.currentTarget.files).then(() => input.current && (input.current.value = ""))} />
      <span>Add ${what}</span> <span class="hint">or drop them here</span>
    </label>
    ${refused && html`<p class="trouble" role="alert" dir="auto">${refused}</p>`}
  </div>`;
}

/** The files that may be sent, as data URLs; `told` says of the first of the others why it may not. */
async function readAll(chosen, kinds, limits, there) {
  const added = [];
  let told = "";
  for (const file of chosen) {
    const kind = kinds.find((one) => TYPES[one].includes(file.type));
    const limit = limits[`${kind}_bytes`];
    if (!kind) told ||= `${file.name} is no ${kinds.join(" or ")} that is read here`;
    else if (file.size > limit) told ||= `${file.name} has ${bytes(file.size)}; ${kind}s may have ${bytes(limit)}`;
    else if (there + added.length >= limits.media_per_job) told ||= `A job may have ${limits.media_per_job} files`;
    else {
      const url = await asDataUrl(file).catch(() => "");
      if (url) added.push({ id: `${file.name} ${file.lastModified} ${Math.random()}`, kind, name: file.name, size: file.size, url });
      else told ||= `${file.name} cannot be read`;
    }
  }
  return { added, told };
}

function asDataUrl(file) {
  return new Promise((done, failed) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => failed(reader.error);
    reader.readAsDataURL(file);
  });
}
