/** When something of the slide does not come: the file is damaged there, or the server is away and is waited for. */

import { getRun } from "./api";

const PAUSE = 2000; // milliseconds between questions

export class Reconnection {
  private waiting = false;
  private blamed = false; // the slide, once
  private gone = false;

  constructor(
    private readonly say: (text: string, problem?: boolean) => void,
    private readonly back: () => void,
  ) {}

  /** Finds out why something did not come, once at a time. */
  missed(): void {
    if (this.waiting || this.gone) return;
    this.waiting = true;
    void getRun().then(
      () => this.blame(),
      () => this.wait(),
    );
  }

  private blame(): void {
    this.waiting = false;
    if (!this.blamed) this.say("Part of the slide's image could not be read.", true);
    this.blamed = true;
  }

  private wait(): void {
    this.say("The server does not answer; the image goes on when it is back.", true);
    setTimeout(() => this.ask(), PAUSE);
  }

  private ask(): void {
    if (this.gone) return;
    void getRun().then(
      () => {
        this.waiting = false;
        this.back();
        this.say("The server is back.");
      },
      () => setTimeout(() => this.ask(), PAUSE),
    );
  }

  destroy(): void {
    this.gone = true;
  }
}
