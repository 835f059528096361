// The theme searches in a web worker, which browsers refuse on pages from the disk. There, run the worker's script in a
// hidden frame of the same page instead: messages to the worker become events of the frame's window.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const inside = frame.contentWindow
      const deliver = (data) => inside.dispatchEvent(new inside.MessageEvent("message", { data }))
      const waiting = []
      this.postMessage = (data) => waiting.push(data)
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = inside.document.createElement("script")
      script.src = url
      script.onload = () => {
        this.postMessage = deliver
        waiting.forEach(deliver)
      }
      inside.document.head.append(script)
    }
  }
}
