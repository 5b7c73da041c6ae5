// One stream of server-sent events, by fetch rather than EventSource: it carries a token, and tells a refusal from a loss.

const SILENCE = 6000; // milliseconds without an event after which a stream is taken for lost
const LONGEST = 5000; // milliseconds between two attempts, at most

export class Stream {
  // on: handlers by event. onState("waiting" | "live" | "refused", status, why).
  constructor(address, on, onState) {
    this.address = address;
    this.on = on;
    this.onState = onState;
    this.token = sessionStorage.getItem("cotenant-token") ?? "";
    this.wait = 250;
    this.timer = 0;
  }

  useToken(token) {
    this.token = token;
    sessionStorage.setItem("cotenant-token", token);
    this.connect();
  }

  async connect() {
    clearTimeout(this.timer);
    const control = new AbortController();
    let watchdog = 0;
    const alive = () => {
      clearTimeout(watchdog);
      watchdog = setTimeout(() => control.abort(), SILENCE);
    };
    try {
      alive();
      const headers = this.token ? { Authorization: `Bearer ${this.token}` } : {};
      const answer = await fetch(this.address, { headers, signal: control.signal, cache: "no-store" });
      if (answer.status === 401 || answer.status === 403) {
        const why = await answer.json().catch(() => ({}));
        this.onState("refused", answer.status, why.error ?? "");
        return;
      }
      if (!answer.ok) throw new Error(`status ${answer.status}`);
      this.onState("live");
      this.wait = 250;
      await this.read(answer.body.getReader(), alive);
    } catch {
      // Lost, or not there yet: try again below.
    } finally {
      clearTimeout(watchdog);
    }
    this.onState("waiting");
    this.timer = setTimeout(() => this.connect(), this.wait);
    this.wait = Math.min(this.wait * 2, LONGEST);
  }

  async read(reader, alive) {
    const decoder = new TextDecoder();
    let text = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      alive();
      text += decoder.decode(value, { stream: true });
      const events = text.split("\n\n");
      text = events.pop();
      for (const event of events) this.handle(event);
    }
  }

  handle(event) {
    const [name, data] = event.split("\n");
    this.on[name.slice("event: ".length)]?.(JSON.parse(data.slice("data: ".length)));
  }
}
