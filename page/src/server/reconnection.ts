/** When something of the slide does not come: the file is damaged there, or the server is away and is waited for. */

import { getRun } from "./api";

const PAUSE = 2000; // milliseconds between questions

export class Reconnection {
  private waiting = false;
  private reported = false; // the slide, once
  private isClosed = false;

  constructor(
    private readonly say: (text: string, problem?: boolean) => void,
    private readonly onReturn: () => void,
  ) {}

  /** Finds out why something did not come, once at a time. */
  check(): void {
    if (this.waiting || this.isClosed) return;
    this.waiting = true;
    void getRun().then(
      () => this.reportDamage(),
      () => this.wait(),
    );
  }

  private reportDamage(): void {
    this.waiting = false;
    if (!this.reported) this.say("Part of the slide's image could not be read.", true);
    this.reported = true;
  }

  private wait(): void {
    this.say("The server does not answer; loading continues when it is back.", true);
    setTimeout(() => this.ask(), PAUSE);
  }

  private ask(): void {
    if (this.isClosed) return;
    void getRun().then(
      () => {
        this.waiting = false;
        this.onReturn();
        this.say("The server is back.");
      },
      () => setTimeout(() => this.ask(), PAUSE),
    );
  }

  destroy(): void {
    this.isClosed = true;
  }
}
